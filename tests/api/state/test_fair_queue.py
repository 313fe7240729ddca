"""Whose work a thread that many wait for does next, and whose never."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pkgutil import resolve_name
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from kb.errors import ServiceBusy
from tests.support.console import GENEROUS_S

FairQueue: Any = resolve_name("kb.api.state.fair_queue:FairQueue")
Requester: Any = resolve_name("kb.api.state.requester:Requester")
requester: Any = resolve_name("kb.api.state.requester:requester")


class Trial:
    """A queue before one thread, which is held until `go` is set."""

    def __init__(self, threads: ThreadPoolExecutor, most_waiting: int) -> None:
        self.queue = FairQueue(threads, 1, most_waiting)
        self.go = threading.Event()
        self.done: list[str] = []

    def ask(self, name: str, **client: Any) -> asyncio.Task[None]:
        async def run() -> None:
            requester.set(Requester(name, **client))
            await self.queue.run(lambda: self._work(name))

        return asyncio.ensure_future(run())

    def _work(self, name: str) -> None:
        assert self.go.wait(GENEROUS_S)
        self.done.append(name)


def tried(steps: Callable[[Trial], Coroutine[Any, Any, None]], most_waiting: int = 100) -> list[str]:
    """The callers whose work was done, in order."""

    async def run() -> list[str]:
        with ThreadPoolExecutor(1) as threads:
            trial = Trial(threads, most_waiting)
            async with asyncio.timeout(GENEROUS_S):
                await steps(trial)
            return trial.done

    return asyncio.run(run())


def test_who_asks_for_little_waits_for_one_piece_of_work_of_who_asks_for_much() -> None:
    async def steps(trial: Trial) -> None:
        greedy = [trial.ask("greedy") for _ in range(20)]
        await asyncio.sleep(0)
        modest = trial.ask("modest")
        await asyncio.sleep(0)
        trial.go.set()
        await asyncio.gather(modest, *greedy)

    done = tried(steps)
    assert done.index("modest") <= 2
    assert len(done) == 21


def test_where_too_many_wait_the_greediest_is_refused() -> None:
    async def steps(trial: Trial) -> None:
        greedy = [trial.ask("greedy") for _ in range(10)]
        await asyncio.sleep(0)
        modest = trial.ask("modest")
        await asyncio.sleep(0)
        trial.go.set()
        await modest
        results = await asyncio.gather(*greedy, return_exceptions=True)
        assert sum(isinstance(result, ServiceBusy) for result in results) == 10 - 4

    assert sorted(tried(steps, most_waiting=4)) == ["greedy"] * 4 + ["modest"]


def test_work_of_a_client_that_has_left_is_not_done() -> None:
    async def steps(trial: Trial) -> None:
        first = trial.ask("first")
        await asyncio.sleep(0)
        gone = trial.ask("gone", leave=asyncio.Event().wait)
        left = trial.ask("left", leave=lambda: asyncio.sleep(0))
        last = trial.ask("last")
        with pytest.raises(ClientDisconnect):
            await left
        gone.cancel()
        await asyncio.wait([gone])
        trial.go.set()
        await asyncio.gather(first, last)

    assert tried(steps) == ["first", "last"]


def test_after_an_error_and_a_cancelled_piece_of_work_the_thread_is_free() -> None:
    async def steps(trial: Trial) -> None:
        running = trial.ask("running")
        await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])
        trial.go.set()
        with pytest.raises(ZeroDivisionError):
            await trial.queue.run(lambda: 1 // 0)
        await trial.ask("next")

    assert tried(steps) == ["running", "next"]
