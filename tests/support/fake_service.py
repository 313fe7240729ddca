"""A service that accepts reports over real HTTP, and misbehaves as a test demands.

Like a kb service, it stores reports by idempotency key, so that a test can count what arrived and how often.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.support.console import GENEROUS_S


def report(entry_id: str = "the-entry", **more: Any) -> dict[str, Any]:
    """A report in its shared form."""
    return {
        "id": entry_id,
        "verdict": "verified",
        "fidelity": "cpu",
        "entry_digest": "e" * 64,
        "probe_digest": "d" * 64,
        "started_at": "2026-03-01T08:00:00Z",
        "duration_s": 1.5,
        "kb_version": "0.1.0",
        **more,
    }


class FakeService(ThreadingHTTPServer):
    """The service. Each request uses up one of `behaviours`; without any it behaves like a kb service."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.kept: dict[str, bytes] = {}
        self.behaviours: list[Behaviour] = []
        self.lock = threading.Lock()
        self.leave = threading.Event()  # ends requests that hang

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors, because clients disconnect on purpose."""


class Request(BaseHTTPRequestHandler):
    """One request, read as a whole."""

    server: FakeService
    key: str
    body: bytes

    def do_POST(self) -> None:
        self.key = self.headers.get("Idempotency-Key", "")
        length = int(self.headers["Content-Length"])
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # the client has disconnected
            return
        with self.server.lock:
            behave = self.server.behaviours.pop(0) if self.server.behaviours else take
            self.server.requests.append(self)
        behave(self)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the standard library
        pass

    def keep(self) -> bool:
        """Store the report. Returns whether it is new; the same key with another body fails the test."""
        with self.server.lock:
            is_new = self.key not in self.server.kept
            assert self.server.kept.setdefault(self.key, self.body) == self.body
        return is_new

    def answer(self, status: int, body: bytes, kind: str = "application/json", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)


Behaviour = Callable[[Request], None]


def take(request: Request) -> None:
    is_new = request.keep()
    request.answer(201 if is_new else 200, json.dumps({"id": 7}).encode())


def says(status: int, detail: str = "", kind: str = "application/problem+json", **headers: str) -> Behaviour:
    """Answer with this and store nothing."""
    body = json.dumps({"title": "A problem", "detail": detail}).encode() if "json" in kind else detail.encode()
    return lambda request: request.answer(status, body, kind, **headers)


def drop(request: Request) -> None:
    """Store the report and lose the answer."""
    request.keep()


def drop_unread(request: Request) -> None:
    """Neither store nor answer the report."""


def garbage(request: Request) -> None:
    request.wfile.write(b"\x16\x03\x01 SSH-2.0-not http at all\r\n\r\n")


def torn(request: Request) -> None:
    """Store the report and send only a part of the answer."""
    request.keep()
    request.send_response(201)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b'{"id"')


def hang(request: Request) -> None:
    request.server.leave.wait(GENEROUS_S)


def keep_and_hang(request: Request) -> None:
    """Store the report and let its sender wait for the answer."""
    request.keep()
    hang(request)


def trickle(request: Request) -> None:
    """Send a byte now and then, so that no single byte takes long."""
    request.wfile.write(b"HTTP/1.1 201 Created\r\nX-Slow: ")
    while not request.server.leave.wait(0.05):
        request.wfile.write(b"x")
        request.wfile.flush()


@contextmanager
def listening() -> Iterator[FakeService]:
    """A service that answers in threads of this process."""
    with FakeService() as service:
        thread = threading.Thread(target=service.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield service
        finally:
            service.leave.set()
            service.shutdown()
            thread.join(60)
