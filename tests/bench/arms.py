"""What an arm costs in addition to its mechanism, and what verifying everything costs."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from kb.harness.launcher import Launcher, Task
from tests.bench.measured import run
from tests.bench.search import KB

ROUNDS = 20
ALL_REDUCE = """
from functools import partial
from kb.probe import Arm, Context, Experiment, Probe, completed, raised


def job(ctx: Context) -> None:
    import torch

    dist = ctx.init_process_group(timeout_s=5)
    ctx.reached()
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    assert tensor.item() == ctx.world_size


arm = dict(job=job, because="an all-reduce", fidelity="cpu")
probe = Probe(experiments=(Experiment("gloo", Arm(expect=raised("never"), **arm), Arm(expect=completed(), **arm)),))
"""


def measure() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name:
        probe = Path(name) / "all_reduce.py"
        probe.write_text(ALL_REDUCE)
        seconds = list(_arms(probe))
        everything = run([KB, "verify", "--all", "--json"], Path(name))
    yield f"| arms, 2 ranks on gloo, median of {ROUNDS} | measured | bar |"
    yield "|---|---|---|"
    yield f"| one all-reduce, from call to outcome | {median(seconds):.2f} s | 0.5 s |"
    yield f"| `kb verify --all` (exit code {everything.code}) | {everything.wall_s:.0f} s | 180 s |"
    yield f"| its own peak memory | {everything.peak_mib:.0f} MiB | 80 MiB |"


def _arms(probe: Path) -> Iterator[float]:
    task = Task("run", probe, 30, world_size=2, arm="treatment", linger=True, has_torch=True)
    with Launcher(Path(sys.executable)) as launcher:
        assert launcher.run(task, "").has_completed
        for _ in range(ROUNDS):
            started = time.perf_counter()
            assert launcher.run(task, "").has_completed
            yield time.perf_counter() - started
