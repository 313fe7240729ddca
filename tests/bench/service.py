"""`make bench-service`: the service under load, one process on loopback, compared with an endpoint that does nothing.

Prints the tables of docs/benchmarks.md and exits with 1 if a bar is missed. `--requests` sets the number of requests
for the row on memory. The bars are ratios within this run; other work on the machine affects the last table most.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import quantiles
from urllib.parse import quote_plus

from kb.authoring.signature_tests import healthy_logs
from kb.content.roots import builtin_root
from tests.bench import load, training_log

QUESTIONS = Path(__file__).with_name("questions.jsonl")
ROUND_S, ROUNDS = 10.0, 3
WARM_UP, REQUESTS = 40_000, 200_000
UPLOADERS, BODY, SEARCHES = 8, 10 << 20, 500
SHARE, TAIL, GROWTH, WAIT_MS = 0.5, 10.0, 0.05, 250.0  # the bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=REQUESTS)
    options = parser.parse_args()
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        for line in (
            *_throughput(home, missed),
            "",
            *_memory(home, options.requests, missed),
            "",
            *_beside(home, missed),
        ):
            print(line, flush=True)
    for bar in missed:
        print(f"missed: {bar}", file=sys.stderr)
    return 1 if missed else 0


def _throughput(home: Path, missed: list[str]) -> Iterator[str]:
    """The table of throughput. Rounds alternate, so that all see the same noise, and the median round counts."""
    asked = _paths(home)
    with load.kb(home) as (port, _), load.constant(home, _median_answer(port, asked)) as other:
        load.wrk(port, asked, 5)
        measured = [
            (
                load.wrk(other, asked, ROUND_S),
                load.wrk(port, asked, ROUND_S),
                load.wrk(port, asked, ROUND_S, first=1_000_000 * number),
            )
            for number in range(1, ROUNDS + 1)
        ]
    least, again, new = (
        sorted(rounds, key=lambda result: result.rate)[ROUNDS // 2] for rounds in zip(*measured, strict=True)
    )
    yield f"| {load.CONNECTIONS} connections | requests/s | share | p50, ms | p99, ms | p99 relative to p50 | errors |"
    yield "|---|---|---|---|---|---|---|"
    yield _row("a constant document from FastAPI", least, least)
    yield _row("`GET /v1/search`, 300 questions in turn", again, least)
    yield _row("`GET /v1/search`, each question new", new, least)
    if again.rate < SHARE * least.rate:
        missed.append(f"{again.rate / least.rate:.2f} of the constant document, at least {SHARE}")
    missed += [
        f"p99 is {result.p99_ms / result.p50_ms:.1f} p50"
        for result in (again, new)
        if result.p99_ms > TAIL * result.p50_ms
    ]
    missed += [f"{result.errors} errors" for result in (least, again, new) if result.errors]


def _row(name: str, result: load.Load, least: load.Load) -> str:
    tail = result.p99_ms / result.p50_ms
    return (
        f"| {name} | {result.rate:.0f} | {result.rate / least.rate:.2f} | {result.p50_ms:.1f} | {result.p99_ms:.1f} "
        f"| {tail:.1f} | {result.errors} |"
    )


def _memory(home: Path, requests: int, missed: list[str]) -> Iterator[str]:
    """The table of memory. Every tenth second all questions are new, so that caches are full when the warm-up ends."""
    asked, done, warm, sizes = _paths(home), 0, 0.0, []
    with load.kb(home) as (port, pid):
        while done < WARM_UP + requests:
            again = load.wrk(port, asked, 9)
            new = load.wrk(port, asked, 1, first=1_000_000 + done)
            done += again.requests + new.requests
            sizes.append(load.memory_mib(pid))
            warm = warm or (sizes[-1] if done >= WARM_UP else 0.0)
    growth = sizes[-1] / warm - 1
    yield "| memory of the service | measured | bar |"
    yield "|---|---|---|"
    yield f"| after {WARM_UP:,} requests | {warm:.0f} MiB | |"
    yield f"| growth in {done - WARM_UP:,} more | {growth * 100:.1f} % | {GROWTH * 100:.0f} % |"
    if growth > GROWTH:
        missed.append(f"memory grew by {growth * 100:.1f} %")


def _beside(home: Path, missed: list[str]) -> Iterator[str]:
    """The table of one client's searches while eight others constantly send logs, or flight-recorder dumps in JSON."""
    log = b"".join(training_log.pieces(BODY, healthy_logs((builtin_root(),))))
    asked = _paths(home).read_text().splitlines()
    with load.kb(home) as (port, _), ProcessPoolExecutor(UPLOADERS) as pool:
        rows = [("alone", _searches(port, asked), "")]
        for name, body in (("logs", log), ("flight-recorder dumps in JSON", _flight_dump(BODY))):
            stop, until = home / name, time.time() + 3600
            sending = [pool.submit(_upload, port, body, stop, until) for _ in range(UPLOADERS)]
            time.sleep(2)
            busy = _searches(port, asked)
            stop.touch()
            done = sum(upload.result() for upload in sending)
            rows.append(
                (f"alongside {UPLOADERS} clients that send {name} of 10 MB ({done} read)", busy, f"{WAIT_MS:.0f} ms")
            )
            if busy[1] > WAIT_MS:
                missed.append(f"a search waits {busy[1]:.0f} ms alongside {name}")
    yield f"| {SEARCHES} searches, one after the other | p50, ms | p99, ms | bar |"
    yield "|---|---|---|---|"
    for name, (middle, tail), bar in rows:
        yield f"| {name} | {middle:.1f} | {tail:.1f} | {bar} |"


def _flight_dump(size: int) -> bytes:
    """About `size` bytes of the dump that a rank writes when a watchdog fires, with the stacks of every collective."""
    frames = [
        {"name": f"step_{depth}", "filename": f"/workspace/model_{depth}.py", "line": depth} for depth in range(30)
    ]
    call = {
        "record_id": 0,
        "process_group": ["0", "default_pg"],
        "collective_seq_id": 1,
        "profiling_name": "nccl:all_reduce",
        "input_sizes": [[4]],
        "output_sizes": [[4]],
        "state": "completed",
        "frames": frames,
    }
    count = size // len(json.dumps(call))
    entries = [{**call, "record_id": number, "collective_seq_id": number + 1} for number in range(count)]
    return json.dumps({"version": "2.4", "rank": 0, "entries": entries}).encode()


def _searches(port: int, paths: list[str]) -> tuple[float, float]:
    """(p50, p99) in milliseconds of searches that each use a new connection, like a new client."""
    times = []
    for number in range(SEARCHES):
        started = time.perf_counter()
        status, _ = _ask(port, "GET", f"{paths[number % len(paths)]}+{number}")
        assert status == 200
        times.append((time.perf_counter() - started) * 1000)
    cuts = quantiles(times, n=100)
    return cuts[49], cuts[98]


def _upload(port: int, log: bytes, stop: Path, until: float) -> int:
    """The number of logs that were answered until the file `stop` exists."""
    done = 0
    while not stop.exists() and time.time() < until:
        status, _ = _ask(port, "POST", "/v1/diagnose", log)
        assert status == 200
        done += 1
    return done


def _ask(port: int, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    try:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def _median_answer(port: int, asked: Path) -> bytes:
    """The answer with the median size."""
    answers = [_ask(port, "GET", path)[1] for path in asked.read_text().splitlines()]
    return sorted(answers, key=len)[len(answers) // 2]


def _paths(home: Path) -> Path:
    """A file with the paths to request, one per line."""
    questions = [json.loads(line)["query"] for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    path = home / "paths"
    path.write_text("".join(f"/v1/search?q={quote_plus(question)}\n" for question in questions))
    return path


if __name__ == "__main__":
    sys.exit(main())
