"""Shares threads among callers: the caller who has used the least CPU time runs next, not the first to ask.

A caller who asks for more than the threads can do mostly delays themselves; others wait for at most one piece of work.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from starlette.requests import ClientDisconnect

from kb.errors import ServiceBusy

from .requester import Requester, requester

MOST_WAITING = 64  # pieces of work; a search takes up to a few hundredths of a second

Result = TypeVar("Result")


class FairQueue:
    """A queue for the event loop. Runs at most `at_once` pieces of work, and one fewer per caller, but at least one."""

    def __init__(
        self,
        threads: ThreadPoolExecutor,
        at_once: int,
        most_waiting: int = MOST_WAITING,
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Create a queue. `clock` is read before and after each piece of work, in its thread."""
        self._threads = threads
        self._clock = clock
        self._at_once, self._most_waiting = at_once, most_waiting
        self._most_per_caller = max(1, at_once - 1)
        self._running: dict[str, int] = {}
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._used_s: dict[str, float] = {}  # by caller, while it waits or runs

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run `work` in a thread and return its result.

        Raises `ServiceBusy` if too much work waits, `ClientDisconnect` if the client leaves before its turn, and what
        `work` raises.
        """
        client = requester.get()
        await self._take_turn(client)
        return await asyncio.wrap_future(self._submit(client.name, work))

    async def _take_turn(self, client: Requester) -> None:
        """Wait for a place, which `_release` gives back."""
        if self._may_run(client.name) and not self._waiting:
            self._grant(client.name)
            return
        turn = self._enqueue(client.name)
        leaving = asyncio.ensure_future(client.leave())
        try:
            await asyncio.wait([turn, leaving], return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            self._drop(client.name, turn)
            raise
        finally:
            leaving.cancel()
        if not turn.done():
            self._drop(client.name, turn)
            raise ClientDisconnect
        turn.result()  # raises if it was refused

    def _submit(self, name: str, work: Callable[[], Result]) -> Future[Result]:
        loop = asyncio.get_running_loop()
        used_s = 0.0

        def timed() -> Result:
            nonlocal used_s
            began = self._clock()
            try:
                return work()
            finally:
                used_s = self._clock() - began

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(lambda: self._release(name, used_s))

        try:
            running = self._threads.submit(timed)
        except RuntimeError:  # the threads have ended
            self._release(name, 0.0)
            raise
        running.add_done_callback(release)
        return running

    def _may_run(self, name: str) -> bool:
        return sum(self._running.values()) < self._at_once and self._running.get(name, 0) < self._most_per_caller

    def _grant(self, name: str) -> None:
        self._running[name] = self._running.get(name, 0) + 1
        self._used_s.setdefault(name, 0.0)

    def _enqueue(self, name: str) -> asyncio.Future[None]:
        """Add a caller to the queue. Beyond the limit, the caller with the most waiting work loses its newest piece.

        A new caller starts with the least time that any caller has used.
        """
        turn = asyncio.get_running_loop().create_future()
        if name not in self._used_s:
            self._used_s[name] = min(self._used_s.values(), default=0.0)
        self._waiting.setdefault(name, deque()).append(turn)
        if sum(map(len, self._waiting.values())) > self._most_waiting:
            greediest = max(self._waiting, key=lambda other: len(self._waiting[other]))
            newest = self._waiting[greediest][-1]
            newest.set_exception(ServiceBusy("too many requests wait for this", "try again in a moment"))
            self._forget(greediest, newest)
        return turn

    def _release(self, name: str, used_s: float) -> None:
        self._running[name] -= 1
        self._used_s[name] += used_s
        if not self._running[name]:
            del self._running[name]
        self._start_next()
        if name not in self._running and name not in self._waiting:
            del self._used_s[name]

    def _start_next(self) -> None:
        while ready := [name for name in self._waiting if self._may_run(name)]:
            name = min(ready, key=self._used_s.__getitem__)
            turn = self._waiting[name][0]
            self._forget(name, turn)
            self._grant(name)
            turn.set_result(None)

    def _drop(self, name: str, turn: asyncio.Future[None]) -> None:
        """Remove a turn whose caller has left, and pass on its place if it already had one."""
        if turn.done():
            if not turn.exception():
                self._release(name, 0.0)
        else:
            self._forget(name, turn)
            if name not in self._running and name not in self._waiting:
                del self._used_s[name]

    def _forget(self, name: str, turn: asyncio.Future[None]) -> None:
        self._waiting[name].remove(turn)
        if not self._waiting[name]:
            del self._waiting[name]
