"""One rank compiles in the middle of a step, and the collective in which the others wait has a shorter timeout."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial

from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Needs, Probe, completed, raised


def train(ctx: Context, *, warm_up: bool) -> None:
    """Two steps. Rank 0 must compile the layers, rank 1 need not: its cache is warm, or it takes no new path."""
    import torch

    timeout_s = 5.0 if ctx.backend == "nccl" else 1.2
    dist = ctx.init_process_group(timeout_s=timeout_s)
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def layers(x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = torch.sin(x) + 1
        return x

    compiled = torch.compile(layers, backend="aot_eager", dynamic=False)  # a compiler that needs no C++ and no Triton
    x = torch.ones(8, device=ctx.device)
    count = 0
    if ctx.rank == 0:  # how many layers take more than twice the timeout to compile on this machine?
        compiled(x, 10)
        begun = time.monotonic()
        compiled(x, 100)
        count = int(100 * 3 * timeout_s / (time.monotonic() - begun))
    run = compiled if ctx.rank == 0 else layers
    ctx.reached()
    if warm_up:
        begun = time.monotonic()
        run(x, count)
        ctx.note(seconds_of_warm_up=round(time.monotonic() - begun, 2))
        dist.barrier(group=patient)  # waits for the slowest compile under a timeout of its own
    for step in range(2):
        dist.all_reduce(x)  # what the step before left over: the ranks start together
        begun = time.monotonic()
        run(x, count)
        ctx.note(**{f"seconds_in_step_{step}": round(time.monotonic() - begun, 2)})
    dist.all_reduce(x)
    assert x[0].item() == 2**3, x
    ctx.meet("trained", timeout_s=15)


STANDS_FOR = (
    "inductor, Triton autotuning or an extension's build; the compile is torch.compile with the backend aot_eager"
)
LATE = "rank 0 compiles inside the first step for longer than the timeout, and rank 1 waits in the next all-reduce"
EARLY = "every rank runs the layers once before the first collective, and the wait for the slowest has its own timeout"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, warm_up=False),
        expect=raised(GLOO_TIMEOUT),
        because=LATE,
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    treatment=Arm(
        partial(train, warm_up=True), expect=completed(), because=EARLY, fidelity="stand-in", stands_for=STANDS_FOR
    ),
    needs=Needs(packages={"torch": ">=2.1"}),
    deadline_s=40,
    expected_s=(4, 5),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE")),
        gloo,
    ),
)
