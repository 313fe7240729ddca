"""Reads the files in an arm's directory, which ranks and guard wrote. A rank may have written anything.

Only regular files are read, since a FIFO would block, and only the beginning and end of long ones.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import IO, Any

LOG_BYTES = 32_768  # read from each end of a log
DOCUMENT_BYTES = 16 << 20
SAVED = (
    "rank*.log",
    "launcher.log",
    "rank*.stacks",
    "nccl_trace_rank_*[0-9]",
    "rank*.json",
    "guard.json",
    "spec.json",
)


def read_log(path: Path) -> str:
    """Read a log; of a long one only its beginning and end. Returns "" if there is none."""
    try:
        with _regular(path) as file:
            head = file.read(LOG_BYTES)
            size = os.fstat(file.fileno()).st_size
            file.seek(max(len(head), size - LOG_BYTES))
            tail = file.read(LOG_BYTES)
    except OSError:
        return ""
    left_out = size - len(head) - len(tail)
    middle = f"\n... {left_out} bytes left out ...\n".encode() if left_out > 0 else b""
    return (head + middle + tail).decode(errors="replace")


def read_object(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None if the file has none."""
    document = _read_document(path)
    return document if isinstance(document, dict) else None


def read_objects(path: Path) -> list[dict[str, Any]] | None:
    """Read a JSON list of objects; None if the file has none."""
    document = _read_document(path)
    is_valid = isinstance(document, list) and all(isinstance(element, dict) for element in document)
    return document if is_valid else None


def save(directory: Path, target: Path) -> None:
    """Copy logs and records to `target`."""
    target.mkdir(parents=True, exist_ok=True)
    for pattern in SAVED:
        for path in directory.glob(pattern):
            with suppress(FileNotFoundError), _regular(path) as file, (target / path.name).open("wb") as copy:
                shutil.copyfileobj(file, copy)


def _read_document(path: Path) -> Any:
    try:
        with _regular(path) as file:
            text = file.read(DOCUMENT_BYTES).decode(errors="replace")
        return json.loads(text, parse_constant=str, parse_float=_number)
    except (OSError, ValueError, RecursionError):
        return None


def _number(text: str) -> float | str:
    """Parse a number. `NaN` and infinities, which JSON does not have, stay text."""
    number = float(text)
    return number if isfinite(number) else text


def _regular(path: Path) -> IO[bytes]:
    """Open a regular file without following links. Raises `FileNotFoundError` for anything else."""
    if path.is_symlink():
        raise FileNotFoundError(f"{path} is a link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise FileNotFoundError(f"{path} is no regular file")
    return os.fdopen(descriptor, "rb")
