"""One rank compiles in the middle of a step, and the collective in which the others wait has a shorter timeout."""

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
    """A backend of torch.compile for forward and backward that takes so long for each graph and uses no processor."""
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: Any, _: Any) -> Any:
        time.sleep(seconds)
        return import_module("functorch.compile").make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph)


def train(ctx: Context, *, warm_up: bool) -> None:
    """Two steps. Rank 0 must compile the step, rank 1 need not: its cache is warm, or it takes no new path."""
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
        begun = time.monotonic()
        run(x)
        ctx.note(seconds_of_warm_up=round(time.monotonic() - begun, 2))
        dist.barrier(group=patient)  # waits for the slowest compile under a timeout of its own
    for step in range(2):
        dist.all_reduce(x)  # what the step before left over: the ranks start together
        begun = time.monotonic()
        run(x)
        ctx.note(**{f"seconds_in_step_{step}": round(time.monotonic() - begun, 2)})
    dist.all_reduce(x)
    assert x[0].item() == 2**3, x
    ctx.meet("trained", timeout_s=15)


def train_ddp(ctx: Context, *, warms_up: bool) -> None:
    """Two steps of DDP. Rank 0 runs the compiled model, rank 1 the same model as it is: its cache is warm."""
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
        begun = time.monotonic()
        ddp(dummy_batch).sum().backward()
        ctx.note(**{f"seconds_in_step_{step}": round(time.monotonic() - begun, 2)})
        optimizer.zero_grad(set_to_none=True)
    ctx.meet("trained", timeout_s=15)


def lengths(ctx: Context, *, marked: bool) -> None:
    """Four lengths through a function that is compiled with `dynamic=False`, or whose second size is marked."""
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


def autocast(ctx: Context, *, as_in_loop: bool) -> None:
    """A warm-up, then a step under autocast: is it the graph of the warm-up?"""
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
    warm = len(compiles)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        function(x)
    if len(compiles) > warm:
        raise Symptom(f"the warm-up compiled {warm} graph, and the step another one")


def updates(ctx: Context, *, normalises_by: str) -> None:
    """A warm-up of a model with BatchNorm, which learns the dummy batch, or with LayerNorm."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4, 4), {"batch": nn.BatchNorm1d, "layer": nn.LayerNorm}[normalises_by](4))
    before = [value.clone() for value in model.state_dict().values()]
    ctx.reached()
    model(torch.ones(2, 4)).sum().backward()
    equal = list(map(torch.equal, before, model.state_dict().values()))
    if not all(equal):
        raise Symptom(f"the warm-up changed {equal.count(False)} of {len(equal)} values of the model")


STANDS_FOR = "inductor, Triton autotuning or an extension's build: a backend of torch.compile that waits so long"
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
                because="rank 0 compiles inside the first forward and backward of DDP",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(train_ddp, warms_up=True),
                expect=completed(),
                because="a step under no_sync compiles both graphs, and a patient group waits for it",
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
                partial(updates, normalises_by="batch"),
                expect=symptom("the warm-up changed 3 of 7 values of the model"),
                because="BatchNorm counts the dummy batch in its statistics",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(updates, normalises_by="layer"),
                expect=completed(),
                because="LayerNorm has no statistics, and the comparison is equal",
                fidelity="cpu",
            ),
            expected_s=(1, 1),
        ),
        Experiment(
            name="lengths",
            world_size=1,
            control=Arm(
                partial(lengths, marked=False),
                expect=symptom("compiled 4 times for 4 lengths"),
                because="each new length is compiled",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(lengths, marked=True),
                expect=completed(),
                because="the size is marked as dynamic, one compile serves all lengths",
                fidelity="cpu",
            ),
            expected_s=(2, 2),
        ),
        Experiment(
            name="autocast",
            world_size=1,
            control=Arm(
                partial(autocast, as_in_loop=False),
                expect=symptom("the warm-up compiled 1 graph, and the step another one"),
                because="the warm-up runs outside of the autocast of the loop",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(autocast, as_in_loop=True),
                expect=completed(),
                because="it runs under the same autocast",
                fidelity="cpu",
            ),
            expected_s=(2, 2),
        ),
    ),
)
