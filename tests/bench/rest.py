"""REST search with eight clients: how long slow requests take compared with usual ones, and whether any fails."""

from __future__ import annotations

import http.client
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import quantiles
from urllib.parse import quote

from tests.bench import load

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
    with tempfile.TemporaryDirectory() as name, load.kb(Path(name)) as (port, _):
        _client(port, 200)
        with ProcessPoolExecutor(CLIENTS) as pool:
            results = list(pool.map(_client, [port] * CLIENTS, [REQUESTS // CLIENTS] * CLIENTS))
    seconds = sorted(second for some, _ in results for second in some)
    errors = sum(count for _, count in results)
    cuts = quantiles(seconds, n=100)
    yield f"| `GET /v1/search`, {len(seconds)} requests, {CLIENTS} clients | measured | bar |"
    yield "|---|---|---|"
    yield f"| p99 relative to p50 | {cuts[98] / cuts[49]:.1f} times | 5 times |"
    yield f"| p50 | {cuts[49] * 1000:.1f} ms | |"
    yield f"| errors | {errors} | 0 |"


def _client(port: int, count: int) -> tuple[list[float], int]:
    """The seconds of each request, and the number of responses that were not 200."""
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
