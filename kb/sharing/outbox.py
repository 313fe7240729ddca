"""The outbox: reports on disk until a service has them, one file each, named by the idempotency key.

A file is written atomically and removed when the service has acknowledged the report. Each attempt sends the same key,
so a process killed at any point neither loses nor duplicates a report (docs/decisions/0024).
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

MAX_REPORTS = 1000  # a node whose service never answers must not fill its disk
HINT = "set XDG_DATA_HOME to a directory that you can write to and that has space left"


@dataclass(frozen=True, slots=True)
class QueuedReport:
    """A report that waits for the service at `url`. `key` is its idempotency key, created when it was queued."""

    key: str
    url: str
    report: Mapping[str, Any]

    @property
    def body(self) -> bytes:
        """The request body, byte for byte the same in all attempts."""
        return json.dumps(self.report).encode()


def default_directory() -> Path:
    """The directory of this user's outbox."""
    return data_home() / "outbox"


@dataclass(frozen=True, slots=True)
class Outbox:
    """A directory of queued reports. Any number of processes may use it. Methods raise only `StoreUnavailable`."""

    directory: Path

    def add(self, url: str, reports: Iterable[Mapping[str, Any]]) -> int:
        """Queue reports for a service. Returns how many of the oldest were dropped to keep at most `MAX_REPORTS`."""
        with _translated_errors(self.directory):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for report in reports:
                _write(self._path(uuid4().hex), {"url": url, "report": report})
            return _drop_oldest(self.directory)

    def waiting(self, url: str) -> list[QueuedReport]:
        """The reports that wait for a service, oldest first. Foreign and damaged files are ignored."""
        with _translated_errors(self.directory):
            reports = (_load(path) for path in _by_age(self.directory) if not path.name.startswith("."))
            return [report for report in reports if report and report.url == url]

    @contextmanager
    def claim(self, queued: QueuedReport) -> Iterator[bool]:
        """Whether the caller may send a report now: it is still queued, and no other process is sending it.

        A claim is a lock on its file, which the kernel releases when the process dies.
        """
        path = self._path(queued.key)
        with _translated_errors(self.directory):
            file = _open(path)
        if file is None:
            yield False
            return
        with file:
            yield _lock(file) and path.exists()

    def remove(self, queued: QueuedReport) -> None:
        """Remove a report that the service has."""
        with _translated_errors(self.directory):
            self._path(queued.key).unlink(missing_ok=True)

    def refuse(self, queued: QueuedReport, problem: str) -> Path:
        """Move a report that the service will never accept to `refused/`, with the reason. Returns its new path."""
        path = self.directory / "refused" / f"{queued.key}.json"
        with _translated_errors(self.directory):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            _write(path, {"url": queued.url, "report": queued.report, "problem": problem})
            _drop_oldest(path.parent)
        self.remove(queued)
        return path

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.json"


@contextmanager
def _translated_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"the outbox {directory} cannot be used: {error.strerror or error}", HINT) from error


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a file atomically, readable only by this user."""
    temporary = path.with_name(f".{path.name}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8") as file:
            json.dump(document, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _load(path: Path) -> QueuedReport | None:
    try:
        document = json.loads(path.read_bytes())
        url, report = document["url"], document["report"]
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return QueuedReport(path.stem, url, report) if isinstance(report, dict) else None


def _open(path: Path) -> IO[bytes] | None:
    try:
        return path.open("r+b")  # writable, since NFS refuses to lock a file opened for reading
    except FileNotFoundError:
        return None


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks, as often on Lustre: only the idempotency key prevents duplicates
        return True
    return True


def _drop_oldest(directory: Path) -> int:
    """Remove the oldest files beyond `MAX_REPORTS`, including temporary files of killed processes. Returns how many."""
    extra = _by_age(directory)[:-MAX_REPORTS]
    for path in extra:
        path.unlink(missing_ok=True)
    return len(extra)


def _by_age(directory: Path) -> list[Path]:
    """The files of a directory, oldest first, without those that another process removes meanwhile."""
    files = []
    for path in directory.iterdir() if directory.exists() else ():
        with suppress(FileNotFoundError):
            status = path.stat()
            if stat.S_ISREG(status.st_mode):
                files.append((status.st_mtime_ns, path))
    return [path for _, path in sorted(files)]
