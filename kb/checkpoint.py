"""Reads the structure of a checkpoint file for the checks of probes, without torch and without running any of it.

Runs in the reader's training interpreter: standard library and Python 3.9 only. Reads `torch.save` and safetensors
files in a forked process with limits on memory and CPU time, so a hostile file can waste only those.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import stat
import time
import zipfile
from math import prod
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Tuple

from kb.runtime.torch_save import LONGEST_NAME, Contents, read_torch_save
from kb.runtime.torch_save import Tensor as Tensor
from kb.runtime.torch_save import Unreadable as Unreadable

SECONDS = 3  # CPU time to read the structure of a file; a normal file takes milliseconds
MEMORY = 1 << 30  # bytes of address space in addition to what the process has
LARGEST_HEADER = 100_000_000  # bytes; safetensors itself refuses larger ones
WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "C64": 8}
WIDTHS.update({"F64": 8, "I64": 8, "U64": 8, "F8_E5M2": 1, "F8_E4M3": 1})
NAMES = {"BOOL": "bool", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


class Checkpoint(NamedTuple):
    """`format` is `torch.save` or `safetensors`; storages map a key to bytes; `names` are the pickle's globals."""

    format: str
    tensors: Tuple[Tensor, ...]
    storages: Dict[str, int]
    names: Tuple[str, ...]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read the structure of one file. Raises `Unreadable`, also for a folder and for other kinds of files."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            names = sorted(
                file.name for file in path.iterdir() if file.suffix in (".pt", ".pth", ".bin", ".safetensors")
            )
            raise Unreadable("%s is a folder: name one file of it %s" % (path, ", ".join(names[:5])))
        if not stat.S_ISREG(mode):
            raise Unreadable("%s is not a regular file" % path)
        with path.open("rb") as file:
            head = file.read(512)
    except (OSError, ValueError) as error:
        raise Unreadable("%s cannot be read: %s" % (path, getattr(error, "strerror", None) or error)) from None
    try:
        form = _format(head)
        tensors, storages, names = _read_in_child(path, form)
    except Unreadable as error:
        raise Unreadable("%s: %s" % (path, error), error.is_torn) from None
    return Checkpoint(form, tuple(_tensor(tensor) for tensor in tensors), storages, tuple(names))


def _tensor(fields: List[Any]) -> Tensor:
    return Tensor(*fields)._replace(shape=tuple(fields[2]))


def _format(head: bytes) -> str:
    """The format of a file that begins with these bytes. Raises `Unreadable` if it is not supported."""
    if head.startswith(b"PK\x03\x04"):
        return "torch.save"
    if head[8:9] == b"{":
        return "safetensors"
    if head.startswith(b"\x80"):
        reason = "torch.save before 1.6, or without _use_new_zipfile_serialization; not read here"
        raise Unreadable("a bare pickle: " + reason)
    if head.startswith(b"version https://git-lfs"):
        raise Unreadable("a git-lfs pointer, not the file that it points to", is_torn=True)
    if head.lstrip()[:1] == b"<":
        raise Unreadable("a web page, not a checkpoint: the download was answered with HTML", is_torn=True)
    if not head:
        raise Unreadable("it is empty", is_torn=True)
    if not any(head):
        raise Unreadable("it begins with zeros: it was created at its size and never filled", is_torn=True)
    raise Unreadable("not a checkpoint, it begins with %s" % head[:4].hex())


def _read_in_child(path: Path, form: str) -> Tuple[List[List[Any]], Dict[str, int], List[str]]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(readable)
            _read_and_answer(path, form, writable)
        finally:
            os._exit(0)
    os.close(writable)
    received, end = [b""], time.monotonic() + 2 * SECONDS
    while select.select([readable], [], [], max(0.0, end - time.monotonic()))[0]:
        received.append(os.read(readable, 1 << 16))
        if not received[-1]:
            break
    os.kill(pid, signal.SIGKILL)  # it has answered or exceeded its time
    os.waitpid(pid, 0)
    os.close(readable)
    try:
        answer = json.loads(b"".join(received))
    except ValueError:
        limits = (SECONDS, MEMORY >> 20)
        raise Unreadable("its structure takes more than %d s or %d MiB to read" % limits) from None
    if "reason" in answer:
        raise Unreadable(answer["reason"], answer["is_torn"])
    return answer["tensors"], answer["storages"], answer["names"]


def _read_and_answer(path: Path, form: str, writable: int) -> None:
    """In the child: read within limits, and write the contents, or why they cannot be read, as one JSON document."""
    answer: Dict[str, Any]
    try:
        with open("/proc/self/statm") as file:
            limit = int(file.read().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        answer = (read_torch_save if form == "torch.save" else _read_safetensors)(path)._asdict()
    except Unreadable as error:
        answer = {"reason": str(error), "is_torn": error.is_torn}
    except zipfile.BadZipFile as error:
        answer = {"reason": "a zip archive that is truncated or torn: %s" % error, "is_torn": True}
    except Exception as error:  # a hostile file can cause any exception
        answer = {"reason": "unreadable: %s: %s" % (type(error).__name__, str(error)[:200]), "is_torn": False}
    with os.fdopen(writable, "wb") as pipe:
        pipe.write(json.dumps(answer).encode())


def _read_safetensors(path: Path) -> Contents:
    """Read the header of a file: eight bytes with its length, then JSON. The bytes of the tensors follow.

    Source: https://huggingface.co/docs/safetensors/index#format
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        if size > LARGEST_HEADER:
            raise Unreadable("its header would have %d bytes: not a safetensors file" % size, is_torn=True)
        text = file.read(size)
        there = os.fstat(file.fileno()).st_size - 8 - size
    if len(text) < size:
        raise Unreadable("it ends inside its header, %d of %d bytes" % (len(text), size), is_torn=True)
    try:
        header = json.loads(text)
        tensors = [_tensor_of(name, fields) for name, fields in header.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise Unreadable("its header is not that of a safetensors file") from None
    end = max((tensor.stop for tensor in tensors), default=0)
    if there < end:
        raise Unreadable("%d of %d bytes of tensors are there: the file is cut short" % (there, end), is_torn=True)
    return Contents(tensors, {"file": there}, [])


def _tensor_of(name: str, fields: Dict[str, Any]) -> Tensor:
    start, stop = map(int, fields["data_offsets"])
    shape = tuple(map(int, fields["shape"]))
    used = prod(shape) * WIDTHS.get(fields["dtype"], 0) or stop - start
    return Tensor(
        name[:LONGEST_NAME], NAMES.get(fields["dtype"], fields["dtype"].lower()), shape, "file", start, stop, used
    )
