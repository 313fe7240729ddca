"""A service that takes reports over real HTTP, misbehaves as it is told, and the nodes that report to it.

It keeps what it takes by idempotency key, as a kb service does, so that a test can count what arrived and how often.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.support.console import GENEROUS_S

# Queues reports (argv 3, JSON) for a service (argv 2) in a directory (argv 1), sends what waits and prints the delivery.
# KILL_AT=n ends it by SIGKILL before its n-th action on the directory or the network; without it the count is printed.
NODE = """
import json, os, re, signal, sys
from dataclasses import asdict
from pathlib import Path
from kb.sharing.outbox import Outbox
from kb.sharing.sender import send
from kb.sharing.client import Service

directory, url, reports = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])
last, count = int(os.environ.get("KILL_AT", "0")), 0
ON_DISK, ON_NETWORK = {"open", "os.mkdir", "os.rename", "os.remove", "os.listdir", "os.scandir"}, {
    "socket.connect", "http.client.send"}

def act(event, args):
    global count
    if event in ON_NETWORK or event == "fcntl.flock" or event in ON_DISK and str(directory) in str(args[0]):
        count += 1
        if count == last:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(act)
outbox = Outbox(directory)
if reports:
    outbox.add(url, reports)
delivery = send(outbox, Service.at(url, os.environ.get("KB_API_KEY", "")), 120)
print(json.dumps({**asdict(delivery), "actions": count}))
"""


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


def start_node(directory: Path, url: str, *reports: dict[str, Any], **env: str) -> subprocess.Popen[bytes]:
    """A process that queues these reports and sends what waits."""
    command = [sys.executable, "-c", NODE, str(directory), url, json.dumps(reports)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, env={**os.environ, **env}
    )


def delivery_of(node: subprocess.Popen[bytes]) -> dict[str, Any]:
    """What a node says when it is done; {} for one that was killed."""
    out, err = node.communicate(timeout=GENEROUS_S)
    if node.returncode == -signal.SIGKILL:
        return {}
    assert node.returncode == 0, err.decode()
    document: dict[str, Any] = json.loads(out)
    return document


class FakeService(ThreadingHTTPServer):
    """`behaviours` are used up, one a request; when there are none left it does as a kb service does."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Request)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.requests: list[Request] = []
        self.kept: dict[str, bytes] = {}
        self.behaviours: list[Behaviour] = []
        self.lock = threading.Lock()
        self.leave = threading.Event()  # ends what hangs

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Its clients go away in the middle on purpose."""


class Request(BaseHTTPRequestHandler):
    """One request, read as a whole."""

    server: FakeService
    key: str
    body: bytes

    def do_POST(self) -> None:
        self.key = self.headers.get("Idempotency-Key", "")
        length = int(self.headers["Content-Length"])
        self.body = self.rfile.read(length)
        if len(self.body) < length:  # its sender is gone
            return
        with self.server.lock:
            behave = self.server.behaviours.pop(0) if self.server.behaviours else take
            self.server.requests.append(self)
        behave(self)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in the standard library
        pass

    def keep(self) -> bool:
        """Whether it is new; the same key with another body fails the test."""
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
    """Answers with this and keeps nothing."""
    body = json.dumps({"title": "A problem", "detail": detail}).encode() if "json" in kind else detail.encode()
    return lambda request: request.answer(status, body, kind, **headers)


def drop(request: Request) -> None:
    """The report is kept, the answer is lost."""
    request.keep()


def drop_unread(request: Request) -> None:
    """Neither kept nor answered."""


def garbage(request: Request) -> None:
    request.wfile.write(b"\x16\x03\x01 SSH-2.0-not http at all\r\n\r\n")


def torn(request: Request) -> None:
    """The report is kept, of the answer only a part arrives."""
    request.keep()
    request.send_response(201)
    request.send_header("Content-Length", "1000")
    request.end_headers()
    request.wfile.write(b'{"id"')


def hang(request: Request) -> None:
    request.server.leave.wait(GENEROUS_S)


def keep_and_hang(request: Request) -> None:
    """The report is kept, and its sender waits for the answer."""
    request.keep()
    hang(request)


def trickle(request: Request) -> None:
    """A byte now and then, so that no wait for a byte is ever long."""
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
