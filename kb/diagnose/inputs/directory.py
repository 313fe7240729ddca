"""The regular files below a folder. Links are followed, loops end, a file with several names counts once."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

Identity = tuple[int, int]  # device and inode


@dataclass(frozen=True, slots=True)
class File:
    """Where it lies and when it was last written, in seconds since the epoch."""

    path: str
    modified: float


@dataclass(slots=True)
class Listing:
    """What a walk found; `is_cut` when there was more than it may look at, `troubles` one sentence each."""

    files: dict[Identity, File] = field(default_factory=dict)
    troubles: list[str] = field(default_factory=list)
    is_cut: bool = False


def list_files(folder: str, most: int) -> Listing:
    """What is not hidden, level by level: a deep folder of shards hides no log beside it. Pipes are not looked at."""
    listing = Listing()
    seen: set[Identity] = set()
    near, linked = deque([(folder, file_identity(os.stat(folder)))]), deque[tuple[str, Identity]]()
    entries = 0
    while near or linked:
        at, this = (near or linked).popleft()  # linked folders come last: a file keeps its own name
        if this in seen:
            continue
        seen.add(this)
        for entry in _entries(at, listing):
            entries += 1
            if entries > most:
                listing.is_cut = True
                return listing
            status = _status(entry, listing)
            if status is None:
                continue
            key = file_identity(status)
            if stat.S_ISDIR(status.st_mode):
                (linked if entry.is_symlink() else near).append((entry.path, key))
            elif stat.S_ISREG(status.st_mode) and (key not in listing.files or not entry.is_symlink()):
                listing.files[key] = File(entry.path, status.st_mtime)
    return listing


def file_identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def printable_path(path: str) -> str:
    """A path as text: one that is no UTF-8 would break every document it is printed in."""
    return os.fsencode(path).decode("utf-8", "replace")


def _entries(folder: str, listing: Listing) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        listing.troubles.append(f"{printable_path(folder)}: cannot be read: {error.strerror}")


def _status(entry: os.DirEntry[str], listing: Listing) -> os.stat_result | None:
    """None for what is hidden, gone, or a link to nowhere."""
    if entry.name.startswith("."):
        return None
    try:
        return entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            listing.troubles.append(f"{printable_path(entry.path)}: cannot be read: {error.strerror}")
        return None
