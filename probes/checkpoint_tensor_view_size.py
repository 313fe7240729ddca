"""A slice of a weight is saved, and torch.save writes the whole weight behind it, as tensor-parallel converters do."""

from __future__ import annotations

import io
import json
import os
import pickle
import re
import resource
import select
import signal
import stat
import time
import zipfile
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, Symptom, completed, symptom, unknown

SHARDS = 8
WASTE = 0.02  # part of the bytes that may be unused before a file counts as exposed
LARGEST_PICKLE = 64 << 20  # bytes; 100,000 tensors make about ten
SECONDS = 3  # CPU time for the structure of a file; an honest one takes milliseconds
MEMORY = 1 << 30  # bytes of address space on top of what the process has


def split(ctx: Context, *, own_storage: bool) -> None:
    """Write one of eight shards of a weight; weigh the file against the tensor in it."""
    import torch

    weight = torch.arange(1 << 20, dtype=torch.float32).reshape(1024, 1024).bfloat16()
    shard = weight.chunk(SHARDS)[3]
    needed = shard.numel() * shard.element_size()
    ctx.reached()
    size = _save(ctx, shard.clone() if own_storage else shard)
    ctx.note(tensor_bytes=needed, file_bytes=size)
    loaded = torch.load(ctx.path("shard.pt"))["layers.0.weight"]
    assert torch.equal(loaded, shard)
    if size > 2 * needed:
        no_cure = {"contiguous": shard.contiguous(), "to": shard.to(torch.bfloat16), "detach": shard.detach()}
        told = ", ".join("%s() gives %d" % (name, _save(ctx, same)) for name, same in no_cure.items())
        raise Symptom("shard.pt has %d bytes, %.1f times its tensor; %s" % (size, size / needed, told))
    assert loaded.untyped_storage().nbytes() == needed


def _save(ctx: Context, tensor: Any) -> int:
    import torch

    torch.save({"layers.0.weight": tensor}, ctx.path("shard.pt"))
    return os.path.getsize(ctx.path("shard.pt"))


def check(params: Mapping[str, Any]) -> Finding:
    """Does a checkpoint hold storages that its tensors use in part? Read without torch, and nothing in it is run."""
    path: Optional[Path] = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="--set checkpoint=/path/to/model.pt")
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(one.name for one in path.iterdir() if one.suffix in (".pt", ".pth", ".bin"))
            return unknown("%s is a folder: name one file of it" % path, *names[:5])
        if not stat.S_ISREG(mode):
            return unknown("%s is not a regular file" % path)
        with path.open("rb") as file:
            reason = _other_format(file.read(16))
    except (OSError, ValueError) as error:
        return unknown("%s cannot be read: %s" % (path, getattr(error, "strerror", None) or error))
    return unknown("%s: %s" % (path, reason)) if reason else _read_in_child(path)


def _other_format(head: bytes) -> str:
    """Why a file that begins so cannot be judged here, "" when it may be an archive of torch.save."""
    if head.startswith(b"PK\x03\x04"):
        return ""
    if head[8:9] == b"{":
        return "a safetensors file: it holds tensors without the storages behind them, and only torch.save is read here"
    if head.startswith(b"\x80"):
        return "a bare pickle: torch.save before 1.6, or without _use_new_zipfile_serialization; not read here"
    return "not a file of torch.save, it begins with %s" % (head[:4].hex() or "nothing: it is empty")


def _read_in_child(path: Path) -> Finding:
    """Read in a forked process with little memory and CPU time: a hostile file can waste those and no more."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(writable, json.dumps(_answer(path)).encode())  # a few hundred bytes: the pipe takes them whole
        finally:
            os._exit(0)
    os.close(writable)
    received, end = b"", time.monotonic() + SECONDS + 1
    while select.select([readable], [], [], max(0.0, end - time.monotonic()))[0]:
        part = os.read(readable, 1 << 16)
        if not part:
            break
        received += part
    os.kill(pid, signal.SIGKILL)  # it has answered, or its time is over
    os.waitpid(pid, 0)
    os.close(readable)
    if not received:
        return unknown("%s: its structure takes more than %d s or %d MiB to read" % (path, SECONDS, MEMORY >> 20))
    state, evidence, advice = json.loads(received)
    return Finding(state, evidence, advice)


def _answer(path: Path) -> Tuple[str, List[str], str]:
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        return _weigh(*_read(path))
    except _Unreadable as error:
        return "unknown", ["%s: %s" % (path, error)], ""
    except zipfile.BadZipFile as error:
        return "unknown", ["%s: a zip archive that is truncated or torn: %s" % (path, error)], ""
    except Exception as error:  # whatever a hostile pickle brings about
        return "unknown", ["%s cannot be read: %s: %s" % (path, type(error).__name__, str(error)[:200])], ""


class _Unreadable(Exception):
    """The file is no checkpoint that can be judged; the message says why."""


class _Storage(NamedTuple):
    """Bytes that the archive holds in one record. `elements` is what tensors count in, bytes where untyped."""

    key: str
    elements: int


class _Tensor(NamedTuple):
    """Where a tensor lies in its storage, in the storage's elements."""

    storage: str
    start: int
    stop: int
    used: int
    shape: Tuple[int, ...]


class _Inert:
    """Stands for every other class and function that a pickle names, and for what they would have made."""

    def __new__(cls, *args: Any, **_: Any) -> _Inert:
        made = super().__new__(cls)
        made.inside = list(args)
        return made

    inside: List[Any]

    def __call__(self, *args: Any, **_: Any) -> _Inert:
        return _Inert(*args)

    def __setstate__(self, state: Any) -> None:
        self.inside.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inside.append((key, value))

    def append(self, value: Any) -> None:
        self.inside.append(value)

    add = extend = append


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any, unit: int = 1) -> Any:
    if not isinstance(storage, _Storage):
        return _Inert(storage)
    is_shaped = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not is_shaped or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (offset, *shape, *stride)):
        raise _Unreadable("it describes a tensor of an impossible shape")
    distinct = prod(size for axis, size in enumerate(shape) if stride[axis])  # stride 0 repeats what is there
    span = 1 + sum((size - 1) * stride[axis] for axis, size in enumerate(shape)) if all(shape) else 0
    if (offset + span) * unit > storage.elements and span:
        raise _Unreadable("it describes a tensor that reaches beyond its storage")
    return _Tensor(storage.key, offset * unit, (offset + span) * unit, min(distinct, span) * unit, shape)


def _rebuild_untyped(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
    dtype = rest[2] if len(rest) > 2 else None
    return _rebuild_tensor(storage, offset, shape, stride, unit=dtype) if isinstance(dtype, int) else _Inert(storage)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, _: Any, args: Any, *rest: Any) -> Any:
    return function(*args) if function in NAMES.values() else _Inert(args, *rest)


NAMES: Dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}
BYTES = {"uint16": 2, "uint32": 4, "uint64": 8, "bits16": 2, "bits8": 1, "complex32": 4}  # dtypes without typed storage


class _Reader(pickle.Unpickler):
    """Reads what a checkpoint is made of. A name in the pickle is never looked up, so no code runs."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: Dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name in BYTES or name.startswith("float8_")):
            return BYTES.get(name, 1)
        return NAMES.get("%s.%s" % (module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            return _Inert(pid)
        key, elements = pid[2], pid[4]
        if not (isinstance(key, str) and isinstance(elements, int) and 0 <= elements < 1 << 62):
            raise _Unreadable("it describes a storage of an impossible size")
        return self.storages.setdefault(key, _Storage(key, elements))


def _read(path: Path) -> Tuple[List[Tuple[str, _Tensor]], Dict[str, _Storage], Dict[str, int]]:
    """Tensors by name, storages, and the bytes that each storage takes in the archive."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
        names = [name for name in records if re.fullmatch(r"(?:[^/]+/)?data\.pkl", name)]
        if len(names) != 1:
            raise _Unreadable("a zip archive without data.pkl: torch.save did not write it")
        if min(info.header_offset for info in records.values()):
            raise _Unreadable("several archives in one file, as torch.distributed.checkpoint writes: not read here")
        prefix = names[0][: -len("data.pkl")]
        if prefix + "constants.pkl" in records:
            raise _Unreadable("a TorchScript archive: only files of torch.save are read here")
        with archive.open(names[0]) as file:
            data = file.read(LARGEST_PICKLE + 1)
    if len(data) > LARGEST_PICKLE:
        raise _Unreadable("its data.pkl is larger than %d MiB" % (LARGEST_PICKLE >> 20))
    reader = _Reader(data)
    tensors = list(_tensors(reader.load()))
    found = {key: records.get(prefix + "data/" + key) for key in reader.storages}
    sizes = {key: record.file_size for key, record in found.items() if record}
    if len(sizes) < len(found):
        raise _Unreadable("%d of %d storages are missing" % (len(found) - len(sizes), len(found)))
    return tensors, reader.storages, sizes


def _tensors(root: Any) -> Iterator[Tuple[str, _Tensor]]:
    """Every tensor with its path through the containers."""
    waiting: List[Tuple[str, Any]] = [("", root)]
    seen = set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, _Tensor):
            yield name, value
        elif isinstance(value, (dict, list, tuple, set, _Inert)) and id(value) not in seen:
            seen.add(id(value))
            inside = [(".".join(filter(None, (name, key)))[-120:], item) for key, item in _items(value)]
            waiting += reversed(inside)


def _items(value: Any) -> Iterator[Tuple[str, Any]]:
    if isinstance(value, _Inert):
        for one in value.inside:
            is_pair = isinstance(one, tuple) and len(one) == 2 and isinstance(one[0], str)
            yield (_label(one[0]), one[1]) if is_pair else ("", one)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield _label(key), item
    else:
        for index, item in enumerate(value):
            yield str(index), item


def _label(key: Any) -> str:
    text = key if isinstance(key, str) else str(key) if isinstance(key, int) else "?"
    return re.sub(r"[^\x20-\x7e]", "?", text[:80])


def _weigh(
    tensors: List[Tuple[str, _Tensor]], storages: Dict[str, _Storage], sizes: Dict[str, int]
) -> Tuple[str, List[str], str]:
    """Compare what every storage holds with what the tensors in it use. Storages of unknown objects count as used."""
    if not tensors:
        return "unknown", ["no tensor was found in it"], ""
    by_storage: Dict[str, List[Tuple[str, _Tensor]]] = {}
    for name, tensor in tensors:
        by_storage.setdefault(tensor.storage, []).append((name, tensor))
    unused = []
    for key, inside in by_storage.items():
        elements = storages[key].elements
        used = sizes[key] * min(elements, _used([tensor for _, tensor in inside])) // max(1, elements)
        unused.append((sizes[key] - used, sizes[key], inside))
    unused.sort(key=lambda one: -one[0])
    total, waste = sum(sizes.values()), sum(one[0] for one in unused)
    told = "tensors use %d of %d bytes (tensors: %d, storages: %d)" % (total - waste, total, len(tensors), len(sizes))
    if waste <= WASTE * total:
        return "clear", [told], ""
    evidence = [told + ": %d bytes (%d %%) are wasted" % (waste, 100 * waste // total)]
    evidence += [_line(*one) for one in unused[:5] if one[0] > WASTE * waste]
    return "exposed", evidence, "clone before saving: {name: tensor.clone() for name, tensor in state.items()}"


def _used(tensors: List[_Tensor]) -> int:
    """Elements that some tensor uses; an upper bound where views with gaps overlap."""
    gapped = {tensor[1:]: tensor.used for tensor in tensors if tensor.used < tensor.stop - tensor.start}
    used, end = sum(gapped.values()), 0
    for start, stop in sorted(tensor[1:3] for tensor in tensors if tensor[1:] not in gapped):
        used += max(0, stop - max(start, end))
        end = max(end, stop)
    return used


def _line(waste: int, size: int, inside: List[Tuple[str, _Tensor]]) -> str:
    name, tensor = inside[0]
    more = " and %d more" % (len(inside) - 1) if len(inside) > 1 else ""
    times = "%.1f times its size" % (size / (size - waste)) if size > waste else "it does not use at all"
    return "%s %s%s: view of a storage %s (%d bytes, %d used)" % (
        name or "the tensor",
        list(tensor.shape)[:8],
        more,
        times,
        size,
        size - waste,
    )


probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "a file of torch.save: .pt, .pth, .bin; nothing in it is run")},
    experiments=(
        Experiment(
            name="shard",
            control=Arm(
                partial(split, own_storage=False),
                expect=symptom(r"bytes, [78]\.\d times its tensor"),
                because="one of eight row slices of a weight is saved as the view it is",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(split, own_storage=True),
                expect=completed(),
                because="the slice is cloned before it is saved",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(memory_mib=512),
            expected_s=(0.1, 0.1),
        ),
    ),
)
