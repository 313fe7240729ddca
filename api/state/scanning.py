"""Scans of logs outside the event loop: few at a time, each in a process with limits set by the kernel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Event, local
from typing import Any

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.isolation.client import ScanServer
from kb.diagnose.isolation.job import Excess
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import Limits
from kb.errors import IndexUnavailable, ServiceBusy, UsageError

from .fair_queue import FairQueue

MOST_AT_ONCE = 4
MOST_S = 30.0  # CPU time for one request: 2 MB can unpack to logs that take minutes
MOST_MEMORY = 256 << 20  # bytes for one request, beyond what its process starts with
LIMITS = Limits(structured=32 << 20, values=2_000_000, records=200_000)
ELSEWHERE = "`kb diagnose FILE` reads files of any size"
REFUSALS = {
    Excess.TIME: "this takes too long to read here",
    Excess.MEMORY: "this takes too much memory to read here",
}


class ScanPool:
    """Threads that wait for scan processes. A scan waits for a free thread before it reads its streams."""

    def __init__(self, signatures: Iterable[dict[str, Any]]) -> None:
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, "kb-scan")
        self._server = ScanServer(signatures)
        self._used = _UsedSeconds()
        self._queue = FairQueue(self.threads, MOST_AT_ONCE, clock=self._used.clock)
        self._is_closing = Event()

    def start(self) -> None:
        """Start the scan server in advance, so that the first scan does not wait for it."""
        with suppress(OSError):  # the scans will report it
            self._server.start()

    async def scan(self, streams: Sequence[Stream]) -> Scan:
        """Scan streams. Continues for at most `MOST_S` after its client has left.

        Raises `UsageError` if `MOST_S` or `MOST_MEMORY` is not enough, `IndexUnavailable` if the service ends,
        `ServiceBusy` if the process is killed, the errors of the streams, and those of `FairQueue.run`.
        """
        return await self._queue.run(partial(self._scan, streams))

    def close(self) -> None:
        """Stop the scans, even in the middle of a log."""
        self._is_closing.set()
        self._server.close()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _scan(self, streams: Sequence[Stream]) -> Scan:
        try:
            answer = self._server.scan(streams, MOST_S, MOST_MEMORY, LIMITS)
        except OSError:
            answer = None
        self._used.seconds += answer.seconds if answer else MOST_S
        if self._is_closing.is_set():
            raise IndexUnavailable("the service is shutting down", "try again in a moment")
        if answer is None:
            raise ServiceBusy("the process that read this was ended", f"try again in a moment; {ELSEWHERE}")
        if isinstance(answer.result, Excess):
            raise UsageError(REFUSALS[answer.result], ELSEWHERE)
        if isinstance(answer.result, str):
            raise RuntimeError(f"a scan failed: {answer.result}")
        return answer.result


class _UsedSeconds(local):
    """CPU seconds of the scans that a thread waited for."""

    seconds = 0.0

    def clock(self) -> float:
        return time.thread_time() + self.seconds
