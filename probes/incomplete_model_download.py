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
from typing import Any, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Set, Tuple

from kb.checkpoint import Checkpoint, Unreadable, read_checkpoint
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, completed, exposed, raised, unknown

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


def load_by_name(ctx: Context, *, name: str) -> None:
    """A whole file of torch.save, read as its name says; torch itself does so from 2.13 on."""
    import torch

    library: Any = importlib.import_module("safetensors.torch")
    weight, path = torch.arange(100_000.0), Path(ctx.path("model.safetensors"))
    torch.save({"weight": weight}, path)
    path = path.rename(path.with_name(name))
    ctx.reached()
    state = library.load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert torch.equal(state["weight"], weight)


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
NEVER_EMPTY = ("tokenizer.model", "tokenizer.json", "config.json", "vocab.txt", "vocab.json", "merges.txt")
JSON = re.compile(r"(.*[-_.])?(config|index|vocab|map|tokens|tokenizer)\.json")  # what libraries write, no logs
ANSWER = re.compile(
    rb"404\b|(entry |repository )?not found|access to model |unauthorized|invalid (username|credentials)", re.I
)
SECONDS = 0.6


def check(params: Mapping[str, Any]) -> Finding:
    """Is a file of this model folder not what its name says, and do the shards exist that the index names?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no model folder was named", advice="--set checkpoint=/path/to/model, a folder or one file")
    try:
        names = [path] if not path.is_dir() else sorted(path.iterdir())[:2000]
        found = _look(names)
    except OSError as error:
        return unknown("%s cannot be read: %s" % (path, error.strerror))
    wrong = found.wrong + (_absent(names) if path.is_dir() else [])
    if wrong or found.misnamed:
        advice = "fetch these files again: git lfs pull, or hf download with --revision and --force-download"
        if not wrong:
            advice = "read the file with the library that wrote it, or give it back its name; fetching brings the same"
        return exposed(*(wrong + found.misnamed)[:8], advice=advice)
    if found.unread or not any(name.suffix in WEIGHTS for name in names):
        return unknown(*(found.unread[:5] or ["no file of weights in %s" % path]))
    folders = [name.name for name in names if name.is_dir() and not name.name.startswith(".")]
    return unknown(
        "the structure of %d files of %s is whole, their content was not compared" % (len(names) - len(folders), path),
        *["not looked into: %s" % ", ".join(folders[:5])] * bool(folders),
        *["only this file was looked at, not its siblings"] * (not path.is_dir()),
        advice="hf cache verify with --fail-on-missing-files, or sha256sum; see Fix 2",
    )


class Found(NamedTuple):
    """`misnamed` are whole files of another format than their name says."""

    wrong: List[str]
    misnamed: List[str]
    unread: List[str]


def _absent(names: List[Path]) -> List[str]:
    """Shards that the names of their siblings count, where no index names them."""
    groups: Dict[Tuple[str, str, str], Set[int]] = {}
    for match in (re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)", path.name) for path in names):
        if match:
            groups.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    return [
        "%s-*-of-%s%s: %d of them are there" % (stem, total, suffix, len(there))
        for (stem, total, suffix), there in groups.items()
        if len(there) < int(total)
    ]


def _look(names: List[Path]) -> Found:
    found = Found([], [], [])
    end = time.monotonic() + SECONDS
    for name in names:
        if time.monotonic() > end:
            found.unread.append("%s and the rest: out of time, name them one by one" % name)
            break
        if name.is_symlink() and not name.exists():
            found.wrong.append("%s: a link to %s, which is not there" % (name, os.readlink(name)))
        elif name.is_file():
            found.wrong.extend(_wrong_content(name, found))
    return found


def _wrong_content(path: Path, found: Found) -> Iterator[str]:
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"version https://git-lfs"):
        yield "%s: a git-lfs pointer of %d bytes, not the file" % (path, len(head))
    elif head.lstrip().lower().startswith((b"<!doctype html", b"<html")) and path.suffix not in (".html", ".md"):
        yield "%s: a web page, not the file" % path
    elif path.suffix in WEIGHTS and head.lstrip()[:1] in (b"{", b"["):
        yield "%s: text, the answer of a server for example: %r" % (path, head[:60])
    elif path.suffix in (*WEIGHTS, ".model", ".json", ".txt") and len(head) < 512 and ANSWER.match(head.lstrip()):
        yield "%s: the answer of a server, not the file: %r" % (path, head[:60])
    elif not head and path.name in NEVER_EMPTY:
        yield "%s: it is empty" % path
    elif path.suffix in WEIGHTS:
        try:
            checkpoint = read_checkpoint(path)
        except Unreadable as error:
            if error.is_torn:
                yield str(error)
            else:
                found.unread.append(str(error))
            return
        if (path.suffix == ".safetensors") != (checkpoint.format == "safetensors"):
            found.misnamed.append("%s: a whole file of %s, against its name" % (path, checkpoint.format))
        elif checkpoint.format == "safetensors":
            yield from _refused(path, checkpoint)
    elif JSON.fullmatch(path.name) and path.stat().st_size < 64 << 20:
        yield from _wrong_json(path)


def _refused(path: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """What safetensors refuses besides: bytes that no tensor covers."""
    at = 0
    for tensor in sorted(checkpoint.tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != at:
            yield "%s: its header leaves a gap or an overlap at byte %d" % (path, at)
            return
        at = tensor.stop
    if at != checkpoint.storages["file"]:
        yield "%s: %d bytes after its last tensor" % (path, checkpoint.storages["file"] - at)


def _wrong_json(path: Path) -> Iterator[str]:
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        return  # too deep for this reader, which says nothing about the file
    except ValueError as error:
        yield "%s: not JSON, %s" % (path, str(error)[:100])
        return
    if not isinstance(content, dict):
        return
    if "error" in content and set(content) <= {"error", "message", "code"}:
        yield "%s: the answer of a server, not the file: %s" % (path, json.dumps(content)[:60])
        return
    if path.name == "tokenizer.json" and "model" not in content:
        yield "%s: no model in it, so it is no tokenizer" % path
    shards = content.get("weight_map") if path.name.endswith(".index.json") else None
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


renamed = Experiment(
    name="renamed",
    control=Arm(
        partial(load_by_name, name="model.safetensors"),
        expect=raised(RUST),
        because="a whole file of torch.save is called model.safetensors and read as such",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(load_by_name, name="pytorch_model.bin"),
        expect=completed(),
        because="it has a name that says what it is, and torch.load reads it",
        fidelity="cpu",
    ),
    world_size=1,
    needs=Needs(packages={"torch": ">=2.1", "safetensors": ""}, memory_mib=512),
    expected_s=(0.3, 0.1),
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
        renamed,
        pair("tokenizers", load_tokenizer, "pointer", r"expected value at line 1 column 1", "tokenizers"),
        pair("tokenizers-cut", load_tokenizer, "cut", r"EOF while parsing", "tokenizers"),
    ),
)
