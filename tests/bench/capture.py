"""`make bench-capture`: time to capture a hanging job, how often the culprit is named, and the cost to a running job.

Options: `--ranks 8 --times 10 --captures 100`; `--kinds sleeping,loader` for some kinds of hang.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.support.console import run_kb, wait_for
from tests.support.hanging import CULPRIT, KINDS, HangingJob, hanging_job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--times", type=int, default=10, help="captures per kind of hang")
    parser.add_argument("--captures", type=int, default=100, help="of a running job")
    parser.add_argument("--kinds", default=",".join(KINDS))
    chosen = parser.parse_args()
    print(f"| kind of hang, {chosen.ranks} ranks | culprit named | seconds, median | longest | bytes |")
    print("|---|---:|---:|---:|---:|")
    for kind in filter(None, chosen.kinds.split(",")):
        print(hang_row(kind, chosen.ranks, chosen.times), flush=True)
    if chosen.captures:
        print("\n" + running_summary(min(chosen.ranks, 4), chosen.captures), flush=True)


def hang_row(kind: str, ranks: int, times: int) -> str:
    """The row for one job, which is captured several times and must then end with the right result."""
    seconds, sizes, named = [], [], 0
    with tempfile.TemporaryDirectory() as folder, hanging_job(kind, Path(folder) / "job", ranks) as job:
        for _ in range(times):
            began = time.monotonic()
            document = captured(job, Path(folder))
            seconds.append(time.monotonic() - began)
            sizes.append(document["bytes"])
            named += is_named(document)
            if not is_named(document):
                print([line["text"] for line in document["diagnosis"]["observations"]], document["problems"])
        job.end_well()
    row = (kind, f"{named} of {times}", f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}", f"{max(sizes):,}")
    return f"| {' | '.join(row)} |"


def captured(job: HangingJob, folder: Path, *options: str) -> Any:
    ended = run_kb("capture", "--pid", str(job.pids[0]), "--out", folder, "--json", *options, cwd=folder)
    assert ended.code == 0, ended.out + ended.err
    return ended.json


def is_named(document: Any) -> bool:
    """Whether the first sentence accuses the culprit, and only the culprit is absent."""
    diagnosis = document["diagnosis"]
    first = next(iter(diagnosis["observations"]), {"rank": None})
    return first["rank"] == CULPRIT and list(diagnosis["ranks"]["absent"]) == [CULPRIT]


def running_summary(ranks: int, captures: int) -> str:
    """Step times of a job before, during and after repeated captures."""
    with tempfile.TemporaryDirectory() as folder, hanging_job("running", Path(folder) / "job", ranks) as job:
        time.sleep(10)
        began = time.time()
        for _ in range(captures):
            captured(job, Path(folder), "--interval", "0.5", "--no-diagnose")
        ended = time.time()
        time.sleep(10)
        job.end_well()
        wait_for((job.folder / "steps-0").exists, "the step times")
        rows = [tuple(map(float, line.split())) for line in (job.folder / "steps-0").read_text().splitlines()]
    parts = {
        "before": [step for at, step in rows if at < began],
        "during": [step for at, step in rows if began <= at < ended],
        "after": [step for at, step in rows if at >= ended],
    }
    told = ", ".join(
        f"{name} {statistics.median(steps) * 1e3:.1f} ms (longest {max(steps) * 1e3:.0f}, {len(steps)} steps)"
        for name, steps in parts.items()
    )
    return f"{captures} captures of a running job of {ranks} ranks, exit codes 0: {told}; {(ended - began) / captures:.1f} s each"


if __name__ == "__main__":
    main()
