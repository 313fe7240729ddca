"""A worker that is killed under load takes nothing but its own requests along, and another takes its place."""

from __future__ import annotations

import http.client
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

from tests.support.console import is_running, wait_for
from tests.support.kb_serve import Serving, serving

CLIENTS = 6


def workers(server: Serving) -> set[int]:
    pid = server.process.pid
    result = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return set(filter(is_worker, result))


def is_worker(pid: int) -> bool:
    with suppress(OSError):  # it has just ended
        return is_running(pid) and b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def ask(server: Serving, stopping: Event) -> tuple[int, int, set[int]]:
    """(answered, broken off, statuses) of one client that asks one question after the other, each on a new connection."""
    answered, broken, statuses = 0, 0, set()
    while not stopping.is_set():
        try:
            statuses.add(server.ask("GET", "/v1/search?q=ALLGATHER+timeout+save")[0])
            answered += 1
        except (OSError, http.client.HTTPException):
            broken += 1
    return answered, broken, statuses


def test_a_killed_worker_takes_no_more_than_its_own_requests_along_and_is_replaced() -> None:
    with serving("--workers", "2") as server, ThreadPoolExecutor(CLIENTS) as clients:
        before, stopping = workers(server), Event()
        asked = [clients.submit(ask, server, stopping) for _ in range(CLIENTS)]
        try:
            killed = min(before)
            os.kill(killed, signal.SIGKILL)
            wait_for(lambda: len(workers(server) - {killed}) == 2, "another worker")
            count = server.output.count('"route": "/v1/search"')
            wait_for(lambda: server.output.count('"route": "/v1/search"') > count + 100, "a hundred more answers")
        finally:
            stopping.set()
        ended = [item.result(60) for item in asked]
        assert sum(broken for _, broken, _ in ended) <= CLIENTS  # each client has one request in flight
        assert set().union(*(statuses for *_, statuses in ended)) == {200}
        assert sum(answered for answered, *_ in ended) > 100
        assert f"worker {killed} has exited" in server.output
        assert len(workers(server)) == 2
