"""One scan in a separate process: its limits and its answer."""

from __future__ import annotations

import math
import resource
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from multiprocessing.connection import Connection
from typing import Any

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher

GRACE_S = 5  # processor time beyond the limit before the kernel ends a process that did not stop


class Excess(Enum):
    """A limit that a scan exceeded."""

    TIME = "time"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class Header:
    """What is known about a stream before its pieces arrive; see `Stream`."""

    name: str
    modified: float | None
    most: int


@dataclass(frozen=True, slots=True)
class Job:
    """The streams that follow, and the limits for reading them: `seconds` of processor time, `memory` in bytes."""

    headers: Sequence[Header]
    seconds: float
    memory: int
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class Answer:
    """`result` is a traceback as text if the scan failed. `seconds` is the processor time used."""

    result: Scan | Excess | str
    seconds: float


class _Stop(BaseException):
    """Ends a scan; a BaseException, so that no reader of an input catches it."""


class _TooLong(_Stop):
    """The processor time is used up."""


class _Abandoned(_Stop):
    """The client has closed the connection."""


def run(connection: Connection, matcher: Matcher) -> None:
    """Read a job and its streams from the connection, and answer."""
    job: Job = connection.recv()
    try:
        _limit(job)
        result: Scan | Excess | str = scan(
            _streams(connection, job.headers), matcher, limits=job.limits, count=len(job.headers)
        )
    except _TooLong:
        result = Excess.TIME
    except MemoryError:
        result = Excess.MEMORY
    except _Abandoned:
        return
    except Exception:
        result = traceback.format_exc()
    signal.setitimer(signal.ITIMER_PROF, 0)
    with suppress(OSError):  # the client has closed the connection
        connection.send(Answer(result, time.process_time()))


def _streams(connection: Connection, headers: Sequence[Header]) -> Iterator[Stream]:
    for header in headers:
        pieces = _pieces(connection)
        yield Stream(header.name, pieces, header.modified, header.most)
        for _ in pieces:  # what the scan did not read
            pass


def _pieces(connection: Connection) -> Iterator[bytes]:
    try:
        yield from iter(connection.recv_bytes, b"")
    except (EOFError, OSError):
        raise _Abandoned from None


def _limit(job: Job) -> None:
    def stop(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, job.seconds)
    seconds = math.ceil(job.seconds) + GRACE_S
    _lower(resource.RLIMIT_CPU, seconds)
    with suppress(FileNotFoundError):  # macOS, which does not limit the memory of a process either
        with open("/proc/self/statm") as file:
            present = int(file.read().split()[0]) * resource.getpagesize()
        _lower(resource.RLIMIT_AS, present + job.memory)


def _lower(kind: int, limit: int) -> None:
    """Set a limit, but never above the present one, which a process may not raise."""
    present = resource.getrlimit(kind)[1]
    lower = limit if present == resource.RLIM_INFINITY else min(limit, present)
    resource.setrlimit(kind, (lower, lower))
