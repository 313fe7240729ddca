"""Reading logs in threads beside the event loop: a few at a time, none for longer than others can wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Event

from kb.diagnose.evidence import Scan
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.errors import IndexUnavailable, UsageError

MOST_AT_ONCE = 4
MOST_S = 30.0  # of one processor for one request: 2 MB can unpack to what would take minutes
LIMITS = Limits(structured=32 << 20, records=200_000)
AHEAD = 64 << 10  # bytes of a log that have to be here before it is given a place


class Scanning:
    """The threads. Who wants one holds a place first: `async with scanning.place`."""

    def __init__(self, matcher: Matcher) -> None:
        self.place = asyncio.Semaphore(MOST_AT_ONCE)
        self.threads = ThreadPoolExecutor(MOST_AT_ONCE, "kb-scan")
        self._matcher = matcher
        self._closing = Event()

    def begin(self, streams: Sequence[Stream]) -> asyncio.Future[Scan]:
        """`scan`, in a thread, which runs on when its client has left, but no longer than `MOST_S`.

        The future raises `UsageError` when that is not enough, and `IndexUnavailable` when the service ends.
        """
        return asyncio.get_running_loop().run_in_executor(self.threads, self._scan, streams)

    def close(self) -> None:
        """Have the threads end, soon: nobody waits for what they read."""
        self._closing.set()
        self.threads.shutdown(wait=False, cancel_futures=True)

    def _scan(self, streams: Sequence[Stream]) -> Scan:
        end = time.thread_time() + MOST_S

        def look(_: int) -> None:
            if time.thread_time() > end:
                raise UsageError("this takes too long to read here", "`kb diagnose FILE` reads files of any size")
            if self._closing.is_set():
                raise IndexUnavailable("the service is ending", "ask again in a moment")

        watched = [replace(stream, pieces=_heard(stream.pieces, look)) for stream in streams]
        return scan(watched, self._matcher, look, LIMITS)


def _heard(pieces: Iterator[bytes], look: Callable[[int], None]) -> Iterator[bytes]:
    """For what unpacks to nothing, and so is never read on."""
    for piece in pieces:
        look(0)
        yield piece


async def begun(body: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """A body whose first pieces are here: who sends one byte a second takes no place from others."""
    first = bytearray()
    async for piece in body:
        first += piece
        if len(first) >= AHEAD:
            break
    return _joined(bytes(first), body)


async def _joined(first: bytes, rest: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    yield first
    async for piece in rest:
        yield piece
