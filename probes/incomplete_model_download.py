"""A model folder contains a git-lfs pointer, a web page or half a file in place of the weights, and loading fails."""

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
    """Downloads the published file `hub-NAME` as NAME, but damaged; if `verified`, its checksum reveals that."""
    published, local = Path(ctx.path("hub-" + name)), Path(ctx.path(name))
    data = published.read_bytes()
    oid = hashlib.sha256(data).hexdigest()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:%s\nsize %d\n" % (oid.encode(), len(data))
    local.write_bytes({"pointer": pointer, "cut": data[: len(data) // 2], "page": PAGE}[what])
    ctx.note(arrived=what, bytes_there=local.stat().st_size, bytes_published=len(data))
    if verified and hashlib.sha256(local.read_bytes()).hexdigest() != oid:
        local.write_bytes(data)  # as git lfs pull does, or a second download


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
    """Reads a complete file of torch.save with the library that its suffix suggests, as torch does since 2.13."""
    import torch

    library: Any = importlib.import_module("safetensors.torch")
    weight, path = torch.arange(100_000.0), Path(ctx.path("model.safetensors"))
    torch.save({"weight": weight}, path)
    path = path.rename(path.with_name(name))
    ctx.reached()
    state = library.load_file(path) if path.suffix == ".safetensors" else torch.load(path)
    assert torch.equal(state["weight"], weight)


def share(ctx: Context, *, waits: bool) -> None:
    """Two ranks share a folder. Rank 1 reads the file while rank 0 still writes it, or waits until it is complete."""
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
JSON = re.compile(
    r"(.*[-_.])?(config|index|vocab|map|tokens|tokenizer)\.json"
)  # files that libraries write, but no logs
ANSWER = re.compile(
    rb"404\b|(entry |repository )?not found|access to model |unauthorized|invalid (username|credentials)", re.I
)
SECONDS = 0.6


def check(params: Mapping[str, Any]) -> Finding:
    """Does each file of this model folder contain what its name says, and does every shard of the index exist?"""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no model folder was named", advice="run --set checkpoint=/path/to/model, a folder or one file")
    try:
        files = [path] if not path.is_dir() else sorted(path.iterdir())[:2000]
        found = _examine(files)
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (path, error.strerror))
    wrong = found.wrong + (_absent(files) if path.is_dir() else [])
    if wrong or found.misnamed:
        advice = "download these files again with git lfs pull, or with hf download --revision ... --force-download"
        if not wrong:
            advice = "read the file with the library that wrote it, or rename it; a new download brings the same file"
        return exposed(*(wrong + found.misnamed)[:8], advice=advice)
    if found.unread or not any(name.suffix in WEIGHTS for name in files):
        return unknown(*(found.unread[:5] or ["%s contains no weights" % path]))
    folders = [name.name for name in files if name.is_dir() and not name.name.startswith(".")]
    return unknown(
        "%d files of %s are complete, but kb did not compare their content" % (len(files) - len(folders), path),
        *["kb did not read these folders: %s" % ", ".join(folders[:5])] * bool(folders),
        *["kb read only this file, not the others in its folder"] * (not path.is_dir()),
        advice="run hf cache verify with --fail-on-missing-files, or sha256sum; see Fix 2",
    )


class Found(NamedTuple):
    """`misnamed` are complete files whose name says another format."""

    wrong: List[str]
    misnamed: List[str]
    unread: List[str]


def _absent(names: List[Path]) -> List[str]:
    """Finds shards that are missing by the count in the names of the others (`-00001-of-00004`)."""
    groups: Dict[Tuple[str, str, str], Set[int]] = {}
    for match in (re.fullmatch(r"(.*)-(\d{5})-of-(\d{5})(\.\w+)", path.name) for path in names):
        if match:
            groups.setdefault((match[1], match[3], match[4]), set()).add(int(match[2]))
    return [
        "%s-*-of-%s%s: only %d of them exist" % (stem, total, suffix, len(present))
        for (stem, total, suffix), present in groups.items()
        if len(present) < int(total)
    ]


def _examine(files: List[Path]) -> Found:
    found = Found([], [], [])
    end = time.monotonic() + SECONDS
    for path in files:
        if time.monotonic() > end:
            found.unread.append("kb had no time for %s and the files after it; name them one by one" % path)
            break
        if path.is_symlink() and not path.exists():
            found.wrong.append("%s: a link to %s, which does not exist" % (path, os.readlink(path)))
        elif path.is_file():
            found.wrong.extend(_wrong_content(path, found))
    return found


def _wrong_content(path: Path, found: Found) -> Iterator[str]:
    with path.open("rb") as file:
        head = file.read(512)
    if head.startswith(b"version https://git-lfs"):
        yield "%s: a git-lfs pointer of %d bytes, not the file" % (path, len(head))
    elif head.lstrip().lower().startswith((b"<!doctype html", b"<html")) and path.suffix not in (".html", ".md"):
        yield "%s: a web page, not the file" % path
    elif path.suffix in WEIGHTS and head.lstrip()[:1] in (b"{", b"["):
        yield "%s: text instead of weights, perhaps the reply of a server: %r" % (path, head[:60])
    elif path.suffix in (*WEIGHTS, ".model", ".json", ".txt") and len(head) < 512 and ANSWER.match(head.lstrip()):
        yield "%s: the reply of a server, not the file: %r" % (path, head[:60])
    elif not head and path.name in NEVER_EMPTY:
        yield "%s: the file is empty" % path
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
            found.misnamed.append(
                "%s: a complete file of the format %s, although its name says another" % (path, checkpoint.format)
            )
        elif checkpoint.format == "safetensors":
            yield from _uncovered_bytes(path, checkpoint)
    elif JSON.fullmatch(path.name) and path.stat().st_size < 64 << 20:
        yield from _wrong_json(path)


def _uncovered_bytes(path: Path, checkpoint: Checkpoint) -> Iterator[str]:
    """Finds bytes that no tensor covers, or two: safetensors refuses such files."""
    at = 0
    for tensor in sorted(checkpoint.tensors, key=lambda tensor: (tensor.start, tensor.stop)):
        if tensor.start != at:
            yield "%s: its header leaves a gap or an overlap at byte %d" % (path, at)
            return
        at = tensor.stop
    if at != checkpoint.storages["file"]:
        yield "%s: the file has %d bytes after its last tensor" % (path, checkpoint.storages["file"] - at)


def _wrong_json(path: Path) -> Iterator[str]:
    try:
        content = json.loads(path.read_bytes())
    except RecursionError:
        return  # the file is nested too deeply for this reader, but may be correct
    except ValueError as error:
        yield "%s: the file is not JSON: %s" % (path, str(error)[:100])
        return
    if not isinstance(content, dict):
        return
    if "error" in content and set(content) <= {"error", "message", "code"}:
        yield "%s: the reply of a server, not the file: %s" % (path, json.dumps(content)[:60])
        return
    if path.name == "tokenizer.json" and "model" not in content:
        yield '%s: the file has no "model", so it is not a tokenizer' % path
    shards = content.get("weight_map") if path.name.endswith(".index.json") else None
    named = {name for name in shards.values() if isinstance(name, str)} if isinstance(shards, dict) else set()
    missing = sorted(name for name in named if not (path.parent / name).exists())
    if missing:
        yield "%s names %d files, of which %d do not exist: %s" % (
            path,
            len(named),
            len(missing),
            ", ".join(missing[:3]),
        )


OPERAND = r"Unsupported operand %d|invalid load key, '%s'"  # weights_only=True is the default since 2.6
TORN = r"failed finding central directory"
RUST = r"deserializing header: (HeaderTooLarge|header too large)"
RUST_CUT = r"deserializing header: (MetadataIncompleteBuffer|incomplete metadata)"
WORDS = {"pointer": "a git-lfs pointer", "cut": "the first half of the weights", "page": "a web page"}


def pair(name: str, job: Callable[..., None], what: str, pattern: str, package: str = "", **options: Any) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(job, what=what, verified=False, **options),
            expect=raised(pattern),
            because="loads the file that arrived, which is %s" % WORDS[what],
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(job, what=what, verified=True, **options),
            expect=completed(),
            because="compares the checksum with the published one, and downloads the file again",
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
        because="reads a complete file of torch.save as safetensors, because it is named model.safetensors",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(load_by_name, name="pytorch_model.bin"),
        expect=completed(),
        because="the same file is named pytorch_model.bin, and torch.load reads it",
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
        because="rank 1 reads the file while rank 0 is still writing it",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(share, waits=True),
        expect=completed(),
        because="local rank 0 downloads the file while the others wait at a barrier",
        fidelity="cpu",
    ),
    expected_s=(0.4, 0.3),
)

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a model folder or one file of it; kb runs no code from it")},
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
