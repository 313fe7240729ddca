"""A search as a whole process, beside the imports that it cannot do without."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from tests.bench.measured import run

KB = str(Path(sys.executable).with_name("kb"))
QUESTION = "ALLGATHER timeout save"
ROUNDS = 21


def measure() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        run([KB, "index"], directory)
        ours, floor = [], []
        for _ in range(ROUNDS):  # interleaved, so that both meet the same noise
            floor.append(run([sys.executable, "-c", "import typer, whoosh.index"], directory))
            ours.append(run([KB, "search", QUESTION], directory))
    assert all(cost.code == 0 for cost in ours)
    ratio = median(cost.cpu_s for cost in ours) / median(cost.cpu_s for cost in floor)
    yield f'| `kb search "{QUESTION}"`, median of {ROUNDS} | measured | bar |'
    yield "|---|---|---|"
    yield f"| CPU time beside `import typer, whoosh.index` | {ratio:.2f} times | 1.5 times |"
    yield f"| CPU time | {median(cost.cpu_s for cost in ours):.3f} s | |"
    yield f"| peak memory | {max(cost.peak_mib for cost in ours):.0f} MiB | 60 MiB |"
