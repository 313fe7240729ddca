"""A model folder holds a pointer, a web page or half a file in place of the weights; or the file its checksum names."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Set, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

PAGE = b"<!DOCTYPE html><html><head><title>403 Forbidden</title></head></html>"


def fetch(ctx: Context, name: str, *, what: str, verified: bool) -> None:
    """`hub-NAME` is the file as published. What arrives as NAME is something else, unless its checksum is compared."""
    published, local = Path(ctx.path("hub-" + name)), Path(ctx.path(name))
    data = published.read_bytes()
    oid = hashlib.sha256(data).hexdigest()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (oid.encode(), len(data))
    local.write_bytes({"pointer": pointer, "cut": data[: len(data) // 2], "page": PAGE}[what])
    ctx.note(arrived=what, bytes_there=local.stat().st_size, bytes_published=len(data))
    if verified and hashlib.sha256(local.read_bytes()).hexdigest() != oid:
        local.write_bytes(data)  # git lfs pull, or the download again


def load_torch(ctx: Context, *, what: str, verified: bool, **options: Any) -> None:
    import torch

    weight = torch.arange(100_000.0)
    torch.save({"weight": weight}, ctx.path("hub-model.bin"))
    fetch(ctx, "model.bin", what=what, verified=verified)
    ctx.reached()
    assert torch.equal(torch.load(ctx.path("model.bin"), **options)["weight"], weight)


def load_safetensors(ctx: Context, *, what: str, verified: bool) -> None:
    import torch

    library: Any = importlib.import_module("safetensors.torch")
    weight = torch.arange(100_000.0)
    library.save_file({"weight": weight}, ctx.path("hub-model.safetensors"))
    fetch(ctx, "model.safetensors", what=what, verified=verified)
    ctx.reached()
    assert torch.equal(library.load_file(ctx.path("model.safetensors"))["weight"], weight)


def load_tokenizer(ctx: Context, *, what: str, verified: bool) -> None:
    library: Any = importlib.import_module("tokenizers")
    words = {"a": 0, "b": 1}
    library.Tokenizer(library.models.WordLevel(words, unk_token="a")).save(ctx.path("hub-tokenizer.json"))
    fetch(ctx, "tokenizer.json", what=what, verified=verified)
    ctx.reached()
    assert library.Tokenizer.from_file(ctx.path("tokenizer.json")).get_vocab() == words


def share(ctx: Context, *, waits: bool) -> None:
    """Two ranks and one folder: the second finds the file that the first still writes, or waits until it is whole."""
    import torch

    dist = ctx.init_process_group(timeout_s=15)
    folder, path = str(ctx.dir), ctx.path("model.bin")
    if ctx.rank == 0:
        torch.save({"weight": torch.arange(100_000.0)}, ctx.path("hub-model.bin"))

    def download(folder: str) -> None:
        data = Path(folder, "hub-model.bin").read_bytes()
        with open(Path(folder, "model.bin"), "wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            if not waits:
                ctx.meet("half")
                ctx.meet("read")
            file.write(data[len(data) // 2 :])

    ctx.reached()
    if waits:
        if int(os.environ["LOCAL_RANK"]) == 0:
            download(folder)
        dist.barrier()
        state = torch.load(path)
    elif ctx.rank == 0:
        download(folder)
        state = torch.load(path)
    else:
        ctx.meet("half")
        try:
            state = torch.load(path)
        finally:
            ctx.meet("read")
    assert state["weight"][-1] == 99_999


WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
SECONDS = 0.6


def check(params: Mapping[str, Any]) -> Finding:
    """Is every file of this model folder what its name says, and do the shards exist that the index names?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no model folder was named", advice="--set checkpoint=/path/to/model, a folder or one file")
    try:
        names = [path] if not path.is_dir() else sorted(path.iterdir())[:2000]
        wrong, unread = _look(names)
    except OSError as error:
        return unknown("%s cannot be read: %s" % (path, error.strerror))
    wrong += _absent(names)
    if wrong:
        return exposed(*wrong[:8], advice="fetch these files again: git lfs pull, or hf download with --force-download")
    if unread or not any(name.suffix in WEIGHTS for name in names):
        return unknown(*(unread[:5] or ["no file of weights in %s" % path]))
    return clear(
        "%d files of %s are what their names say" % (len(names), path),
        "their checksums were not compared, and of a tokenizer.model only its first bytes were read",
    )


def _absent(names: List[Path]) -> List[str]:
    """Shards that the names of their siblings count, where no index names them."""
    groups: Dict[Tuple[str, str, str], Set[int]] = {}
    for match in (re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)", path.name) for path in names):
        if match:
            groups.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    return [
        "%s-*-of-%s%s: %d of them are there" % (stem, total, suffix, len(there))
        for (stem, total, suffix), there in groups.items()
        if len(names) > 1 and len(there) < int(total)
    ]


def _look(names: List[Path]) -> Any:
    wrong: List[str] = []
    unread: List[str] = []
    end = time.monotonic() + SECONDS
    for name in names:
        if time.monotonic() > end:
            unread.append("%s and the rest: out of time, name them one by one" % name)
            break
        if name.is_symlink() and not name.exists():
            wrong.append("%s: a link to %s, which is not there" % (name, os.readlink(name)))
        elif name.is_file():
            wrong += _wrong_content(name, unread)
    return wrong, unread


def _wrong_content(path: Path, unread: List[str]) -> Iterator[str]:
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"version https://git-lfs"):
        yield "%s: a git-lfs pointer of %d bytes, not the file" % (path, len(head))
    elif head.lstrip().lower().startswith((b"<!doctype html", b"<html")) and path.suffix not in (".html", ".md"):
        yield "%s: a web page, not the file" % path
    elif path.suffix in WEIGHTS and head.lstrip()[:1] in (b"{", b"["):
        yield "%s: text, the answer of a server for example: %r" % (path, head[:60])
    elif path.suffix in WEIGHTS:
        try:
            read_checkpoint(path)
        except Unreadable as error:
            if error.is_torn:
                yield str(error)
            else:
                unread.append(str(error))
    elif path.suffix == ".json" and path.stat().st_size < 64 << 20:
        yield from _wrong_json(path)


def _wrong_json(path: Path) -> Iterator[str]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        yield "%s: not JSON, %s" % (path, str(error)[:100])
        return
    shards = content.get("weight_map") if isinstance(content, dict) and path.name.endswith(".index.json") else None
    named = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    missing = sorted(name for name in named if not (path.parent / name).exists())
    if missing:
        yield "%s names %d files, %d are not there: %s" % (path, len(named), len(missing), ", ".join(missing[:3]))


OPERAND = r"Unsupported operand %d|invalid load key, '%s'"  # weights_only=True is the default since 2.6
TORN = r"failed finding central directory"
RUST = r"deserializing header: (HeaderTooLarge|header too large)"
RUST_CUT = r"deserializing header: (MetadataIncompleteBuffer|incomplete metadata)"
WORDS = {"pointer": "a git-lfs pointer", "cut": "the first half", "page": "a web page"}


def pair(name: str, job: Callable[..., None], what: str, pattern: str, package: str = "", **options: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(job, what=what, verified=False, **options),
            expect=raised(pattern),
            because="what arrived is loaded as it is: %s" % WORDS[what],
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(job, what=what, verified=True, **options),
            expect=completed(),
            because="its checksum is compared with the published one, and the file is fetched again",
            fidelity="cpu",
        ),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1", **({package: ""} if package else {})}, memory_mib=512),
        expected_s=(0.1, 0.1) if not package else (0.3, 0.3),
    )


shared = Experiment(
    name="one-fetches",
    control=Arm(
        partial(share, waits=False),
        expect=raised(TORN),
        because="a rank reads the file that another one still writes",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(share, waits=True),
        expect=completed(),
        because="one rank fetches it, the others wait",
        fidelity="cpu",
    ),
    expected_s=(0.4, 0.3),
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a model folder or one file of it; nothing in it is run")},
    experiments=(pair("torch", load_torch, "pointer", OPERAND % (118, "v")),),
    variants=(
        pair("cut", load_torch, "cut", TORN),
        pair("page", load_torch, "page", OPERAND % (60, "<")),
        pair("weights-only-false", load_torch, "pointer", "invalid load key, 'v'", weights_only=False),
        shared,
        pair("safetensors", load_safetensors, "pointer", RUST, "safetensors"),
        pair("safetensors-cut", load_safetensors, "cut", RUST_CUT, "safetensors"),
        pair("tokenizers", load_tokenizer, "pointer", r"expected value at line 1 column 1", "tokenizers"),
        pair("tokenizers-cut", load_tokenizer, "cut", r"EOF while parsing", "tokenizers"),
    ),
)
