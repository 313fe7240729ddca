"""Servers under load from wrk: `kb serve`, and the simplest possible server of the same kind."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.bench.search import KB

SCRIPT = Path(__file__).with_name("wrk.lua")
CONNECTIONS = 32
UNLIMITED = {"KB_RATE": ""}  # no rate limit, which is not what is measured

CONSTANT = """
import json, socket, sys
from pathlib import Path
import uvicorn
from fastapi import FastAPI

app, document = FastAPI(), json.loads(Path(sys.argv[1]).read_text())

@app.get("/v1/search")
async def search() -> dict:
    return document

@app.get("/readyz")
async def ready() -> dict:
    return {}

listener = socket.create_server(("127.0.0.1", int(sys.argv[2])))
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False)).run(sockets=[listener])
"""


@dataclass(frozen=True)
class Load:
    """What wrk measured. `errors` counts requests that failed or were not answered with 2xx."""

    requests: int
    seconds: float
    bytes: int
    p50_ms: float
    p99_ms: float
    errors: int

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds


def wrk(port: int, paths: Path, seconds: float, first: int | None = None) -> Load:
    """Request these paths in turn. With `first`, a number is added to each question, so that none is repeated."""
    options = ["--threads", "1", "--connections", str(CONNECTIONS), "--duration", f"{seconds:.0f}s"]
    numbered = [] if first is None else [str(first)]
    script = ["--script", str(SCRIPT), f"http://127.0.0.1:{port}", "--", str(paths), *numbered]
    output = subprocess.run(["wrk", *options, *script], capture_output=True, text=True, check=True).stdout
    return Load(**json.loads(output.splitlines()[-1]))


@contextmanager
def kb(home: Path) -> Iterator[tuple[int, int]]:
    """(port, pid) of a `kb serve` that is ready."""
    port = _free_port()
    environment = {**os.environ, **UNLIMITED, "XDG_DATA_HOME": str(home)}
    with _running([KB, "serve", "--port", str(port)], home, port, environment) as pid:
        yield port, pid


@contextmanager
def constant(home: Path, document: bytes) -> Iterator[int]:
    """The port of a FastAPI application that always answers with this document, under the same server."""
    port, path = _free_port(), home / "constant.json"
    path.write_bytes(document)
    with _running([sys.executable, "-c", CONSTANT, str(path), str(port)], home, port, dict(os.environ)):
        yield port


def memory_mib(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) / 1024


@contextmanager
def _running(command: list[str], home: Path, port: int, environment: dict[str, str]) -> Iterator[int]:
    with (home / "server.log").open("ab") as log:
        server = subprocess.Popen(command, cwd=home, env=environment, stdout=log, stderr=log)
    try:
        _wait_until_ready(port)
        yield server.pid
    finally:
        server.terminate()
        server.wait(20)


def _wait_until_ready(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.1)
    sys.exit("the server was not ready within a minute")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
