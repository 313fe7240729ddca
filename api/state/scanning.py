"""Threads that scan logs beside the event loop: few, and none for longer than others can wait."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event, Lock

from kb.diagnose.evidence import Scan
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.errors import IndexUnavailable, UsageError

from .fair_queue import FairQueue

MOST_AT_ONCE = 4
MOST_S = 30.0  # of processor time for one request: 2 MB can unpack to logs that take minutes
LIMITS = Limits(structured=32 << 20, values=2_000_000, records=200_000, reading=Lock())


class ScanPool:
    """The threads. A scan waits for a free one before it reads its streams."""

    def __init__(self, matcher: Matcher) -> None:
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, "kb-scan")
        self._queue = FairQueue(self.threads, MOST_AT_ONCE)
        self._matcher = matcher
        self._is_closing = Event()

    async def scan(self, streams: Sequence[Stream]) -> Scan:
        """Runs on when its client has left, but no longer than `MOST_S`.

        Raises `UsageError` when that is not enough, `IndexUnavailable` when the service ends, the errors of the
        streams, and those of `FairQueue.run`.
        """
        return await self._queue.run(partial(self._scan, streams))

    def close(self) -> None:
        """End the threads soon, in the middle of a log."""
        self._is_closing.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _scan(self, streams: Sequence[Stream]) -> Scan:
        end = time.thread_time() + MOST_S

        def check(_: int) -> None:
            if time.thread_time() > end:
                raise UsageError("this takes too long to read here", "`kb diagnose FILE` reads files of any size")
            if self._is_closing.is_set():
                raise IndexUnavailable("the service is shutting down", "try again in a moment")

        def checked(piece: bytes) -> bytes:
            check(len(piece))
            return piece

        # `scan` calls `check` for what it reads; a compressed stream may unpack to nothing.
        watched = [replace(stream, pieces=map(checked, stream.pieces)) for stream in streams]
        return scan(watched, self._matcher, check, LIMITS)
