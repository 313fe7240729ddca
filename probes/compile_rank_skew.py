"""One rank compiles during a step, and takes longer than the timeout of the collective in which the others wait."""

from __future__ import annotations

import time
from datetime import timedelta
from functools import partial
from importlib import import_module
from typing import Any

from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Needs,
    Probe,
    Symptom,
    completed,
    raised,
    symptom,
)


def compiler(seconds: float) -> Any:
    """Returns a backend of torch.compile, for forward and backward, that sleeps for `seconds` for each graph."""
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: Any, _: Any) -> Any:
        time.sleep(seconds)
        return import_module("functorch.compile").make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


def train(ctx: Context, *, warm_up: bool) -> None:
    """Runs two steps. Rank 0 must compile; rank 1 need not, because its cache is warm or it takes no new path."""
    import torch

    timeout_s = 5.0 if ctx.backend == "nccl" else 1.2
    dist = ctx.init_process_group(timeout_s=timeout_s)
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def layers(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x) + 1

    run = torch.compile(layers, backend=compiler(2.5 * timeout_s)) if ctx.rank == 0 else layers
    x = torch.ones(8, device=ctx.device)
    ctx.reached()
    if warm_up:
        started = time.monotonic()
        run(x)
        ctx.note(seconds_of_warm_up=round(time.monotonic() - started, 2))
        dist.barrier(group=patient)  # waits for the slowest compile, with a longer timeout
    for step in range(2):
        dist.all_reduce(x)  # so that the ranks start the step together
        started = time.monotonic()
        run(x)
        ctx.note(**{f"seconds_in_step_{step}": round(time.monotonic() - started, 2)})
    dist.all_reduce(x)
    assert x[0].item() == 2**3, x
    ctx.meet("trained", timeout_s=15)


def train_ddp(ctx: Context, *, warms_up: bool) -> None:
    """Runs two steps of DDP. Rank 0 compiles the model; rank 1 runs it uncompiled, as if its cache were warm."""
    import torch
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    timeout_s = 5.0 if ctx.backend == "nccl" else 1.2
    dist = ctx.init_process_group(timeout_s=timeout_s)
    patient = dist.new_group(backend="gloo", timeout=timedelta(hours=1))

    class Layers(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.sin(x * self.weight)

    model = Layers().to(ctx.device)
    dummy_batch = torch.ones(8, device=ctx.device)
    compiled = torch.compile(model, backend=compiler(2 * timeout_s)) if ctx.rank == 0 else model
    ctx.meet("built", timeout_s=60)
    ddp = DistributedDataParallel(compiled)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    ctx.reached()
    if warms_up:
        before = [value.clone() for value in model.state_dict().values()]
        with ddp.no_sync():
            ddp(dummy_batch).sum().backward()
        assert all(map(torch.equal, before, model.state_dict().values())), "the forward updates the model: use Fix 1"
        optimizer.zero_grad(set_to_none=True)
        dist.barrier(group=patient)
    for step in range(2):
        started = time.monotonic()
        ddp(dummy_batch).sum().backward()
        ctx.note(**{f"seconds_in_step_{step}": round(time.monotonic() - started, 2)})
        optimizer.zero_grad(set_to_none=True)
    ctx.meet("trained", timeout_s=15)


def compile_lengths(ctx: Context, *, marked: bool) -> None:
    """Runs four lengths through a function compiled with `dynamic=False`, or (`marked`) with a dynamic dimension."""
    import torch

    compiles = []

    def counting(graph: Any, _: Any) -> Any:
        compiles.append(1)
        return graph.forward

    function = torch.compile(lambda x: x.sin().sum(1), backend=counting, dynamic=None if marked else False)
    ctx.reached()
    for length in (5, 7, 11, 13):
        x = torch.ones(2, length)
        if marked:
            torch._dynamo.mark_dynamic(x, 1)
        function(x)
    ctx.note(compiles=len(compiles))
    if len(compiles) > 1:
        raise Symptom(f"compiled {len(compiles)} times for 4 lengths")


def compile_under_autocast(ctx: Context, *, as_in_loop: bool) -> None:
    """Runs a warm-up, then a step under autocast. Does the step use the graph of the warm-up?"""
    import torch

    compiles = []

    def counting(graph: Any, _: Any) -> Any:
        compiles.append(1)
        return graph.forward

    function = torch.compile(lambda x: (x @ x).sum(), backend=counting)
    x = torch.ones(4, 4)
    ctx.reached()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=as_in_loop):
        function(x)
    in_warm_up = len(compiles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function(x)
    if len(compiles) > in_warm_up:
        raise Symptom(f"the warm-up compiled {in_warm_up} graph, and the step another one")


def warm_up_norm(ctx: Context, *, normalises_by: str) -> None:
    """Warms up a model with BatchNorm, whose statistics then include the dummy batch, or with LayerNorm."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[normalises_by](4))
    before = [value.clone() for value in model.state_dict().values()]
    ctx.reached()
    model(torch.ones(2, 4)).sum().backward()
    equal = list(map(torch.equal, before, model.state_dict().values()))
    if not all(equal):
        raise Symptom(f"the warm-up changed {equal.count(False)} of {len(equal)} values of the model")


STANDS_FOR = "inductor, Triton autotuning or the build of an extension; a backend of torch.compile sleeps instead"
LATE = "rank 0 compiles in the first step for longer than the timeout, while rank 1 waits in the next all-reduce"
EARLY = "every rank compiles before the first collective, then waits for the slowest rank with a longer timeout"

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
    deadline_s=90,
    expected_s=(4, 5),
)

probe = Probe(
    experiments=(
        gloo.on_gpus(
            expect=raised(
                rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
            )
        ),
        gloo,
    ),
    variants=(
        Experiment(
            name="ddp",
            control=Arm(
                partial(train_ddp, warms_up=False),
                expect=raised(GLOO_TIMEOUT),
                because="rank 0 compiles in the first forward and backward of DDP, while rank 1 waits in an all-reduce",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(train_ddp, warms_up=True),
                expect=completed(),
                because="a step under no_sync compiles both graphs, and a group with a longer timeout waits for it",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            deadline_s=90,
            expected_s=(5, 6),
        ),
        Experiment(
            name="updates",
            world_size=1,
            control=Arm(
                partial(warm_up_norm, normalises_by="batch"),
                expect=symptom("the warm-up changed 3 of 7 values of the model"),
                because="BatchNorm includes the dummy batch in its statistics",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(warm_up_norm, normalises_by="layer"),
                expect=completed(),
                because="LayerNorm has no statistics, so the warm-up changes nothing",
                fidelity="cpu",
            ),
            expected_s=(1, 1),
        ),
        Experiment(
            name="lengths",
            world_size=1,
            control=Arm(
                partial(compile_lengths, marked=False),
                expect=symptom("compiled 4 times for 4 lengths"),
                because="dynamic=False compiles each new length",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(compile_lengths, marked=True),
                expect=completed(),
                because="the dimension is marked as dynamic, so one compile serves all lengths",
                fidelity="cpu",
            ),
            expected_s=(2, 2),
        ),
        Experiment(
            name="autocast",
            world_size=1,
            control=Arm(
                partial(compile_under_autocast, as_in_loop=False),
                expect=symptom("the warm-up compiled 1 graph, and the step another one"),
                because="the warm-up runs without the autocast of the training loop, so the step compiles again",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(compile_under_autocast, as_in_loop=True),
                expect=completed(),
                because="the warm-up runs under the same autocast as the training loop",
                fidelity="cpu",
            ),
            expected_s=(2, 2),
        ),
    ),
)
