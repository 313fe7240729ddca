"""Lists the regular files below a folder. It follows links, survives loops, and counts a file with two names once."""

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
    """`modified` is when it was last written, in seconds since the epoch; `is_linked`: it is below a linked folder."""

    path: str
    modified: float
    is_linked: bool = False


@dataclass(slots=True)
class Listing:
    """The result of a walk; `is_cut` if it ended at its limit. `problems` are sentences."""

    files: dict[Identity, File] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_cut: bool = False


def list_files(folder: str, most: int) -> Listing:
    """The files that are not hidden, level by level, so that a log is found before the files of a deep sibling folder.

    At most `most` entries are read. Pipes are left out.
    """
    listing = Listing()
    seen: set[Identity] = set()
    folders, linked = deque([(folder, file_identity(os.stat(folder)))]), deque[tuple[str, Identity]]()
    entries = 0
    is_linked = False
    while folders or linked:
        is_linked = is_linked or not folders  # linked folders come last, so that a file keeps its real path
        path, folder_id = (folders or linked).popleft()
        if folder_id in seen:
            continue
        seen.add(folder_id)
        for entry in _entries(path, listing):
            entries += 1
            if entries > most:
                listing.is_cut = True
                return listing
            status = _status(entry, listing)
            if status is None:
                continue
            key = file_identity(status)
            if stat.S_ISDIR(status.st_mode):
                (linked if entry.is_symlink() else folders).append((entry.path, key))
            elif stat.S_ISREG(status.st_mode) and (key not in listing.files or not entry.is_symlink()):
                listing.files[key] = File(entry.path, status.st_mtime, is_linked)
    return listing


def file_identity(status: os.stat_result) -> Identity:
    return status.st_dev, status.st_ino


def printable_path(path: str) -> str:
    """A path as valid UTF-8 text, since other bytes would break every document that prints it."""
    return os.fsencode(path).decode("utf-8", "replace")


def _entries(folder: str, listing: Listing) -> Iterator[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            yield from entries
    except OSError as error:
        listing.problems.append(f"{printable_path(folder)}: cannot be read: {error.strerror}")


def _status(entry: os.DirEntry[str], listing: Listing) -> os.stat_result | None:
    """The status of a file; None if it is hidden or deleted, or a broken link."""
    if entry.name.startswith("."):
        return None
    try:
        return entry.stat()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ELOOP):
            listing.problems.append(f"{printable_path(entry.path)}: cannot be read: {error.strerror}")
        return None
