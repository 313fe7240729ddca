"""Clients of POST /v1/diagnose that begin and then hardly go on."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import httpx

from tests.support.replicas import Place, Replica, started

LOG = b"[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB.\n"
MANY = 40  # more than there are threads that read logs


def begin(replica: Replica, stack: ExitStack) -> socket.socket:
    """A connection over which a log was announced and one line of it sent."""
    client = stack.enter_context(socket.create_connection(("127.0.0.1", replica.port), timeout=60))
    head = (
        f"POST /v1/diagnose HTTP/1.1\r\nHost: localhost\r\nContent-Length: {2 * len(LOG)}\r\nConnection: close\r\n\r\n"
    )
    client.sendall(head.encode() + LOG)
    return client


def test_who_sends_a_log_slowly_keeps_nobody_waiting_and_gets_an_answer(tmp_path: Path, home: Path) -> None:
    with started(Place(tmp_path, home / "cache", {"KB_RATE": ""})) as replica, ExitStack() as stack:
        slow = [begin(replica, stack) for _ in range(MANY)]
        answer = httpx.post(f"{replica.url}/v1/diagnose", content=LOG, timeout=60, trust_env=False)
        assert (answer.status_code, answer.json()["read"]["lines"]) == (200, 1)
        for client in slow:
            client.sendall(LOG)
        for client in slow:
            assert client.recv(15) == b"HTTP/1.1 200 OK"
