"""Reports that are to be sent, on disk until a service has them: one file each, named by its idempotency key.

A file appears whole and goes when the service has said that it has the report. Every try carries the same key, so
that a process killed at any point neither loses a report nor makes the service keep it twice.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from kb.errors import StoreUnavailable
from kb.paths import data_home

MOST = 1000  # files; a node that reports to nobody must not fill its disk
HINT = "set XDG_DATA_HOME to a directory that you can write to and that has space left"


@dataclass(frozen=True, slots=True)
class Queued:
    """A report that waits for the service at `url`. `key` is its idempotency key, made when it was queued."""

    key: str
    url: str
    report: Mapping[str, Any]

    @property
    def body(self) -> bytes:
        """What every try sends, byte for byte."""
        return json.dumps(self.report).encode()


def default_directory() -> Path:
    """Where the reports of this user wait."""
    return data_home() / "outbox"


@dataclass(frozen=True, slots=True)
class Outbox:
    """A directory of queued reports. Any number of processes may use it; methods raise `StoreUnavailable` only."""

    directory: Path

    def add(self, url: str, reports: Iterable[Mapping[str, Any]]) -> int:
        """Queue reports for a service; how many of the oldest had to go because `MOST` wait already."""
        with _border(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for report in reports:
                _write(self._path(uuid4().hex), {"url": url, "report": report})
            return _drop_oldest(self.directory)

    def waiting(self, url: str) -> list[Queued]:
        """What waits for a service, oldest first. A file that is none of ours is passed over."""
        with _border(self.directory):
            found = (_read(path) for path in _by_age(self.directory) if not path.name.startswith("."))
            return [queued for queued in found if queued and queued.url == url]

    @contextmanager
    def claim(self, queued: Queued) -> Iterator[bool]:
        """Whether the caller alone may send it now: it is still there, and nobody else is sending it.

        The claim is a lock on its file, which the system takes from a process that dies.
        """
        path = self._path(queued.key)
        with _border(self.directory):
            file = _open(path)
        if file is None:
            yield False
            return
        with file:
            yield _lock(file) and path.exists()

    def remove(self, queued: Queued) -> None:
        """The service has it."""
        with _border(self.directory):
            self._path(queued.key).unlink(missing_ok=True)

    def refuse(self, queued: Queued, problem: str) -> Path:
        """The service will never take it: put it aside with the reason. Returns where it lies."""
        path = self.directory / "refused" / f"{queued.key}.json"
        with _border(self.directory):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, {"url": queued.url, "report": queued.report, "problem": problem})
            _drop_oldest(path.parent)
        self.remove(queued)
        return path

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


@contextmanager
def _border(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the outbox {directory} cannot be used: {error.strerror or error}", HINT) from error


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """A whole file or none, for this user alone."""
    beside = path.with_name(f".{path.name}")
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def _read(path: Path) -> Queued | None:
    try:
        document = json.loads(path.read_bytes())
        url, report = document["url"], document["report"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return Queued(path.stem, url, report) if isinstance(report, dict) else None


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("r+b")  # writable, or a lock on NFS is refused
    except FileNotFoundError:
        return None


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a filesystem without locks, as Lustre often is: then the idempotency key alone keeps it single
        return True
    return True


def _drop_oldest(directory: Path) -> int:
    """Remove what is beyond `MOST`, what killed processes left half written included; how many went."""
    extra = _by_age(directory)[:-MOST]
    for path in extra:
        path.unlink(missing_ok=True)
    return len(extra)


def _by_age(directory: Path) -> list[Path]:
    """The files of a directory, oldest first, without those that another process takes away meanwhile."""
    found = []
    for path in directory.iterdir() if directory.exists() else ():
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(found)]
