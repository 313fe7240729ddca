"""Reads the structure of a `torch.save` file without torch: tensors by name and the storages behind them.

A pickle is a program. This reader imports none of the names in it, so no code of the file runs: classes and functions
become inert stand-ins that record their arguments. Runs in the reader's training interpreter: standard library and
Python 3.9 only. `kb.checkpoint` calls it in a process with limits.
"""

from __future__ import annotations

import io
import pickle
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

LARGEST_PICKLE = 64 << 20  # bytes; 100,000 tensors take about ten MiB
LONGEST_NAME = 500

DTYPES = {  # class of a typed storage: dtype, and bytes per element
    "DoubleStorage": ("float64", 8),
    "FloatStorage": ("float32", 4),
    "HalfStorage": ("float16", 2),
    "BFloat16Storage": ("bfloat16", 2),
    "LongStorage": ("int64", 8),
    "IntStorage": ("int32", 4),
    "ShortStorage": ("int16", 2),
    "CharStorage": ("int8", 1),
    "ByteStorage": ("uint8", 1),
    "BoolStorage": ("bool", 1),
    "ComplexFloatStorage": ("complex64", 8),
    "ComplexDoubleStorage": ("complex128", 16),
}
UNTYPED = {"uint16": 2, "uint32": 4, "uint64": 8, "bits16": 2, "bits8": 1, "complex32": 4}  # no typed storage


class Unreadable(Exception):
    """The file cannot be judged; the message says why.

    `is_torn`: it is an incomplete checkpoint, or something else was stored in its place.
    """

    def __init__(self, reason: str, is_torn: bool = False) -> None:
        super().__init__(reason)
        self.is_torn = is_torn


class Tensor(NamedTuple):
    """A named tensor: the bytes of its storage that it spans (`start`, `stop`), and how many of them it `used`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    storage: str
    start: int
    stop: int
    used: int


class Contents(NamedTuple):
    """The tensors in file order, the bytes of each storage, and the names of classes and functions in the pickle."""

    tensors: list[Tensor]
    storages: dict[str, int]
    names: list[str]


def read_torch_save(path: Path) -> Contents:
    """Read a file.

    Raises `Unreadable`, `zipfile.BadZipFile` for a torn archive, and anything else that a hostile pickle causes.
    """
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
        pickles = [name for name in records if re.fullmatch(r"(?:[^/]+/)?data\.pkl", name)]
        if len(pickles) != 1:
            raise Unreadable("a zip archive without data.pkl: torch.save did not write it")
        if min(info.header_offset for info in records.values()):
            raise Unreadable("several archives in one file, as torch.distributed.checkpoint writes: not read here")
        prefix = pickles[0][: -len("data.pkl")]
        if prefix + "constants.pkl" in records:
            raise Unreadable("a TorchScript archive: only files of torch.save are read here")
        with archive.open(pickles[0]) as file:
            data = file.read(LARGEST_PICKLE + 1)
    if len(data) > LARGEST_PICKLE:
        raise Unreadable("its data.pkl is larger than %d MiB" % (LARGEST_PICKLE >> 20))
    reader = _Reader(data)
    tensors = list(_named_tensors(reader.load()))
    stored = {key: records.get(prefix + "data/" + key) for key in reader.storages}
    sizes = {key: record.file_size for key, record in stored.items() if record}
    if len(sizes) < len(stored):
        raise Unreadable("%d of %d storages are missing" % (len(stored) - len(sizes), len(stored)), is_torn=True)
    return Contents(tensors, sizes, sorted(reader.names))


class _Storage(NamedTuple):
    """The bytes of one record of the archive; `size` is their number according to the pickle."""

    key: str
    dtype: str
    unit: int
    size: int


class _StorageClass(NamedTuple):
    dtype: str
    unit: int


class _Inert:
    """Stands in for every other class and function that a pickle names, and for the objects they would create."""

    inside: list[Any]

    def __new__(cls, *args: Any, **_: Any) -> _Inert:
        made = super().__new__(cls)
        made.inside = list(args)
        return made

    def __call__(self, *args: Any, **_: Any) -> _Inert:
        return _Inert(*args)

    def __setstate__(self, state: Any) -> None:
        self.inside.append(state)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.inside.append((key, value))

    def append(self, value: Any) -> None:
        self.inside.append(value)

    add = extend = append


def _rebuild_tensor(storage: Any, offset: Any, shape: Any, stride: Any, *_: Any) -> Any:
    return _tensor(storage, offset, shape, stride, storage.dtype, storage.unit) if _is_real(storage) else _Inert()


def _rebuild_untyped(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
    dtype = rest[2] if len(rest) > 2 else None
    if not _is_real(storage) or not isinstance(dtype, _StorageClass):
        return _Inert(storage)
    return _tensor(storage, offset, shape, stride, *dtype)


def _is_real(storage: Any) -> bool:
    return isinstance(storage, _Storage)


def _tensor(storage: _Storage, offset: Any, shape: Any, stride: Any, dtype: str, unit: int) -> Tensor:
    is_shaped = isinstance(shape, tuple) and isinstance(stride, tuple) and len(shape) == len(stride)
    if not is_shaped or not all(isinstance(n, int) and 0 <= n < 1 << 62 for n in (offset, *shape, *stride)):
        raise Unreadable("it describes a tensor of an impossible shape")
    distinct = prod(size for axis, size in enumerate(shape) if stride[axis])  # stride 0 repeats elements
    span = 1 + sum((size - 1) * stride[axis] for axis, size in enumerate(shape)) if all(shape) else 0
    if span and (offset + span) * unit > storage.size:
        raise Unreadable("it describes a tensor that reaches beyond its storage")
    start, stop = offset * unit, (offset + span) * unit
    return Tensor("", dtype, shape, storage.key, start, stop, min(distinct, span) * unit)


def _rebuild_parameter(data: Any, *_: Any) -> Any:
    return data


def _rebuild_from_type(function: Any, _: Any, args: Any, *rest: Any) -> Any:
    return function(*args) if function in REBUILT.values() else _Inert(args, *rest)


REBUILT: dict[str, Any] = {
    "torch._utils._rebuild_tensor": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor,
    "torch._utils._rebuild_tensor_v3": _rebuild_untyped,
    "torch._utils._rebuild_parameter": _rebuild_parameter,
    "torch._utils._rebuild_parameter_with_state": _rebuild_parameter,
    "torch._tensor._rebuild_from_type_v2": _rebuild_from_type,
}


class _Reader(pickle.Unpickler):
    """Loads the tensors and containers of a checkpoint, and records every other name in it."""

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.storages: dict[str, _Storage] = {}
        self.names: set[str] = set()

    def find_class(self, module: str, name: str) -> Any:
        module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        self.names.add("%s.%s" % (module, name))
        if module == "torch" and name in DTYPES:
            return _StorageClass(*DTYPES[name])
        if module == "torch" and (name in UNTYPED or name.startswith("float8_")):
            return _StorageClass(name, UNTYPED.get(name, 1))
        return REBUILT.get("%s.%s" % (module, name), _Inert)

    def persistent_load(self, pid: Any) -> Any:
        if not (isinstance(pid, tuple) and len(pid) == 5 and pid[0] == "storage"):
            return _Inert(pid)
        kind, key, elements = pid[1], pid[2], pid[4]
        if not (isinstance(key, str) and isinstance(elements, int) and 0 <= elements < 1 << 62):
            raise Unreadable("it describes a storage of an impossible size")
        dtype, unit = kind if isinstance(kind, _StorageClass) else ("bytes", 1)
        return self.storages.setdefault(key, _Storage(key, dtype, unit, elements * unit))


def _named_tensors(root: Any) -> Iterator[Tensor]:
    """Every tensor with its path through the containers, in order; an object that contains itself is visited once."""
    waiting: list[tuple[str, Any]] = [("", root)]
    seen = set()
    while waiting:
        name, value = waiting.pop()
        if isinstance(value, Tensor):
            yield value._replace(name=name)
        elif isinstance(value, (dict, list, tuple, set, _Inert)) and id(value) not in seen:
            seen.add(id(value))
            inside = [(".".join(filter(None, (name, key)))[-LONGEST_NAME:], item) for key, item in _items(value)]
            waiting += reversed(inside)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, _Inert):
        for item in value.inside:
            is_pair = isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str)
            yield (_label(item[0]), item[1]) if is_pair else ("", item)
    elif isinstance(value, dict):
        for key, item in value.items():
            yield _label(key), item
    else:
        for index, item in enumerate(value):
            yield str(index), item


def _label(key: Any) -> str:
    text = key if isinstance(key, str) else str(key) if isinstance(key, int) else "?"
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_NAME])
