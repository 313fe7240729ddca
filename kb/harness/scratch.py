"""Temporary directories that do not outlive kb for long: a later run removes those of a kb that was killed.

The owner of a directory holds a lock on it, which the kernel releases however the owner ends. Unlike a pid in the name,
this also works between containers that share /tmp. Removal copes with what a hostile job leaves: folders without
permissions, and thousands of nested ones.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIXES = ("kb-arm-", "kb-preload-")
NEW_S = 10.0  # a directory this new has an owner that may not have locked it yet
REMOVE_S = 60.0
NULL = subprocess.DEVNULL


@contextmanager
def directory(prefix: str) -> Iterator[Path]:
    """A new directory, removed at the end of the block as far as possible. Raises `OSError` if it cannot be created."""
    path = Path(tempfile.mkdtemp(prefix=prefix))
    lock = _lock(path)
    try:
        yield path
    finally:
        remove(path)
        if lock is not None:
            os.close(lock)


def abandoned() -> list[Path]:
    """This user's directories that no running process owns, as after a power cut."""
    candidates = [path for prefix in PREFIXES for path in Path(tempfile.gettempdir()).glob(f"{prefix}*")]
    return sorted(path for path in candidates if _is_abandoned(path))


def sweep() -> None:
    """Remove the abandoned directories."""
    for path in abandoned():
        remove(path)


def remove(path: Path) -> None:
    """Delete a tree as far as this user can, without following links to directories."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        for command in (("chmod", "-R", "u+rwx", "--", str(path)), ("rm", "-rf", "--", str(path))):
            with suppress(OSError, subprocess.SubprocessError):
                subprocess.run(command, stdin=NULL, stdout=NULL, stderr=NULL, timeout=REMOVE_S, check=False)


def _is_abandoned(path: Path) -> bool:
    try:
        status = path.lstat()
    except OSError:
        return False
    is_ours = status.st_uid == os.geteuid() and not path.is_symlink()
    if not is_ours or time.time() - status.st_ctime < NEW_S:
        return False
    lock = _lock(path)
    if lock is None:
        return False
    os.close(lock)
    return True


def _lock(path: Path) -> int | None:
    """Lock a directory and return the descriptor that holds the lock; None if it is taken or not supported."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor
