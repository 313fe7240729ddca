"""A model folder holds a pointer, a web page or half a file in place of the weights; or the file its checksum names."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Optional

from kb.checkpoint import Unreadable, read_checkpoint
from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

PAGE = b"<!DOCTYPE html><html><head><title>403 Forbidden</title></head></html>"
WHATS = ("pointer", "cut", "page")


def fetch(ctx: Context, name: str, *, verified: bool) -> None:
    """`hub-NAME` is the file as published. What arrives as NAME is something else, unless its checksum is compared."""
    published, local = Path(ctx.path("hub-" + name)), Path(ctx.path(name))
    data = published.read_bytes()
    oid = hashlib.sha256(data).hexdigest()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (oid.encode(), len(data))
    what = str(ctx.params["what"])
    assert what in WHATS, "what is one of %s" % ", ".join(WHATS)
    local.write_bytes({"pointer": pointer, "cut": data[: len(data) // 2], "page": PAGE}[what])
    ctx.note(arrived=what, bytes_there=local.stat().st_size, bytes_published=len(data))
    if verified and hashlib.sha256(local.read_bytes()).hexdigest() != oid:
        local.write_bytes(data)  # git lfs pull, or the download again


def load_torch(ctx: Context, *, verified: bool) -> None:
    import torch

    weight = torch.arange(100_000.0)
    torch.save({"weight": weight}, ctx.path("hub-model.bin"))
    fetch(ctx, "model.bin", verified=verified)
    ctx.reached()
    assert torch.equal(torch.load(ctx.path("model.bin"))["weight"], weight)


def load_safetensors(ctx: Context, *, verified: bool) -> None:
    import torch

    library: Any = importlib.import_module("safetensors.torch")
    weight = torch.arange(100_000.0)
    library.save_file({"weight": weight}, ctx.path("hub-model.safetensors"))
    fetch(ctx, "model.safetensors", verified=verified)
    ctx.reached()
    assert torch.equal(library.load_file(ctx.path("model.safetensors"))["weight"], weight)


def load_tokenizer(ctx: Context, *, verified: bool) -> None:
    library: Any = importlib.import_module("tokenizers")
    words = {"a": 0, "b": 1}
    library.Tokenizer(library.models.WordLevel(words, unk_token="a")).save(ctx.path("hub-tokenizer.json"))
    fetch(ctx, "tokenizer.json", verified=verified)
    ctx.reached()
    assert library.Tokenizer.from_file(ctx.path("tokenizer.json")).get_vocab() == words


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
    if wrong:
        return exposed(*wrong[:8], advice="fetch these files again: git lfs pull, or hf download with --force-download")
    if unread or not any(name.suffix in WEIGHTS for name in names):
        return unknown(*(unread[:5] or ["no file of weights in %s" % path]))
    return clear("%d files of %s are what their names say" % (len(names), path), "their checksums were not compared")


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


TORCH = r"Unsupported operand (118|60)|invalid load key, '[v<]'|failed finding central directory"
RUST = r"deserializing header: (HeaderTooLarge|MetadataIncompleteBuffer|header too large|incomplete metadata)"
JSON = r"expected value at line 1 column 1|EOF while parsing"


def pair(job: Callable[..., None], pattern: str, name: str, **more: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(job, verified=False),
            expect=raised(pattern),
            because="what arrived is loaded as it is (--set what=pointer, cut or page)",
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(job, verified=True),
            expect=completed(),
            because="its checksum is compared with the published one, and the file is fetched again",
            fidelity="cpu",
        ),
        world_size=1,
        **more,
    )


libraries = {"safetensors": (load_safetensors, RUST), "tokenizers": (load_tokenizer, JSON)}

probe = Probe(
    check=check,
    params={
        "checkpoint": Param("path", "a model folder or one file of it; nothing in it is run"),
        "what": Param("str", "what arrives in place of the file: %s" % ", ".join(WHATS), "pointer"),
    },
    experiments=(pair(load_torch, TORCH, "torch", needs=Needs(memory_mib=512), expected_s=(0.1, 0.1)),),
    variants=tuple(
        pair(job, pattern, name, needs=Needs(packages={"torch": ">=2.1", name: ""}), expected_s=(0.3, 0.3))
        for name, (job, pattern) in libraries.items()
    ),
)
