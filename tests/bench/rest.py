"""REST search under eight clients: how long the slow ones take beside the usual, and whether any fails."""

from __future__ import annotations

import http.client
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from statistics import quantiles
from urllib.parse import quote

from search import KB

CLIENTS = 8
REQUESTS = 10_000
QUESTIONS = (
    "ALLGATHER timeout save",
    "保存 NCCL 超时",
    "256 != 2 * 18 * 7",
    "Connection reset by peer",
    "OOM reference model",
)


def measure() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        server = subprocess.Popen([KB, "serve", "--port", str(port)], cwd=name, stderr=subprocess.DEVNULL)
        try:
            _wait_until_ready(port)
            _client(port, 200)
            with ProcessPoolExecutor(CLIENTS) as pool:
                results = list(pool.map(_client, [port] * CLIENTS, [REQUESTS // CLIENTS] * CLIENTS))
        finally:
            server.terminate()
            server.wait(20)
    seconds = sorted(one for some, _ in results for one in some)
    errors = sum(count for _, count in results)
    cuts = quantiles(seconds, n=100)
    yield f"| `GET /v1/search`, {len(seconds)} requests, {CLIENTS} clients | measured | bar |"
    yield "|---|---|---|"
    yield f"| p99 beside p50 | {cuts[98] / cuts[49]:.1f} times | 5 times |"
    yield f"| p50 | {cuts[49] * 1000:.1f} ms | |"
    yield f"| errors | {errors} | 0 |"


def _client(port: int, count: int) -> tuple[list[float], int]:
    """(seconds of each request, how many were not 200)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    seconds, errors = [], 0
    for number in range(count):
        started = time.perf_counter()
        connection.request("GET", f"/v1/search?q={quote(QUESTIONS[number % len(QUESTIONS)])}&limit=5")
        response = connection.getresponse()
        response.read()
        seconds.append(time.perf_counter() - started)
        errors += response.status != 200
    connection.close()
    return seconds, errors


def _wait_until_ready(port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        if time.monotonic() > end:
            sys.exit("the server was not ready within a minute")
        time.sleep(0.1)
