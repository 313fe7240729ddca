"""One rank has one batch more than the other, as any split of data by rank, file or token budget may produce."""

from __future__ import annotations

from functools import partial
from typing import Any, Iterable, Iterator, Optional

from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Probe, completed, raised

BATCHES = (4, 3)  # rank by rank


def train(ctx: Context, *, stop_together: bool) -> None:
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model = DistributedDataParallel(nn.Linear(16, 16).to(ctx.device))
    batches: Iterable[Any] = [torch.randn(2, 16, device=ctx.device) for _ in range(BATCHES[ctx.rank])]
    if stop_together:
        batches = in_step(batches, ctx.device)
    ctx.reached()
    steps = 0
    for batch in batches:
        model(batch).sum().backward()
        assert model.module.weight.grad.isfinite().all().item()  # waits for the GPU, as logging a loss does
        steps += 1
    ctx.note(steps=steps)
    ctx.meet("trained", timeout_s=15)  # the rank that ran out of data is alive and busy elsewhere, as in training
    assert steps == min(BATCHES), steps


def in_step(batches: Iterable[Any], device: Any) -> Iterator[Any]:
    """The entry's fix: before every step all ranks agree on whether each of them has a batch."""
    import torch
    import torch.distributed as dist

    iterator = iter(batches)
    while True:
        batch: Optional[Any] = next(iterator, None)
        ready = torch.tensor([float(batch is not None)], device=device)
        dist.all_reduce(ready, op=dist.ReduceOp.MIN)
        if not ready.item():
            return
        yield batch


UNEVEN = "rank 0 has a fourth batch, and the all-reduce of its gradient finds no partner"
EVEN = "the ranks agree before every step and stop together after the third"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, stop_together=False),
        expect=raised(GLOO_TIMEOUT),
        because=UNEVEN,
        fidelity="cpu",
    ),
    treatment=Arm(partial(train, stop_together=True), expect=completed(), because=EVEN, fidelity="cpu"),
    expected_s=(3.3, 0.2),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE")),
        gloo,
    ),
)
