"""An expert is gathered only where a token chose it, so ranks with other tokens gather other experts.

The first collectives that meet have one size and complete: an expert is put together from pieces of another one, and
the output is wrong without an error. The hang comes afterwards, when one rank has a call left.
"""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any, Tuple

from kb.probe import Arm, Context, Experiment, Needs, Probe, completed, raised


def sharded(ctx: Context, *, every_expert: bool) -> None:
    """FSDP2, which gathers each expert by itself, as ZeRO-3 does."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model, x = model_and_tokens(ctx, every_expert)
    expected = model(x).detach()  # the same weights on every rank, not sharded yet
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    for expert in model[1].experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)
    ctx.reached()
    step(ctx, model, x, expected, torch.Tensor.backward)


def zero3(ctx: Context, *, leaf: bool) -> None:
    """DeepSpeed itself, on CPU and gloo, without its compiled operators."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import torch

    deepspeed: Any = importlib.import_module("deepspeed")
    for operator in list(deepspeed.ops.__compatible_ops__):
        deepspeed.ops.__compatible_ops__[operator] = False  # none is built here, that takes a minute
    ctx.init_process_group(timeout_s=2)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    model, x = model_and_tokens(ctx, every_expert=False)
    expected = model(x).detach()
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, [type(model[1])])
    engine = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},  # shard small weights too
            "zero_allow_untested_optimizer": True,
        },
    )[0]
    ctx.reached()
    step(ctx, engine, x, expected, engine.backward)


def model_and_tokens(ctx: Context, every_expert: bool) -> Tuple[Any, Any]:
    """Rank 0's two tokens choose expert 0, rank 1's choose one expert each."""
    import torch
    from torch import nn

    class Moe(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = torch.tensor([row for row in range(2) if chosen[row] == number], dtype=torch.long).to(x.device)
                if len(rows) == 0 and not every_expert:
                    continue
                total = total.index_add(0, rows, expert(x[rows]))  # with no rows: an empty batch
            return total

    chosen = (0, ctx.rank)  # what a router would say
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Moe(), nn.Linear(8, 8)).to(ctx.device)
    return model, torch.randn(2, 8).to(ctx.device)


def step(ctx: Context, model: Any, x: Any, expected: Any, backward: Any) -> None:
    wrong = ""
    try:
        output = model(x)
        error = (output.detach() - expected).abs().max().item()
        ctx.note(largest_error_of_the_output=round(error, 5))
        if error > 1e-4:
            wrong = f" Before that, without an error: the output is off by {error:.3f}."
        backward(output.sum())
    except RuntimeError as failure:  # gloo; with nccl the watchdog ends the process
        raise RuntimeError(f"{failure}.{wrong}") from failure
    ctx.meet("trained", timeout_s=15)  # the rank with fewer calls is alive and busy elsewhere, as in training
    assert not wrong, wrong


GLOO = raised(  # the rank whose output is wrong times out, or loses the other one that did
    r"(Timed out waiting \d+ms for (recv|send) operation|Connection (closed|reset) by peer)"
    r".*Before that, without an error: the output is off"
)
SOME = "only rank 1 has a token for expert 1, so its calls meet other calls of rank 0, and its last ones none"
ALL = "each rank runs each expert, if need be on an empty batch, so all ranks gather the same experts in one order"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(sharded, every_expert=False),
        expect=GLOO,
        because=SOME,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; for FSDP2 with each expert wrapped by itself this is the real thing",
    ),
    treatment=Arm(
        partial(sharded, every_expert=True),
        expect=completed(),
        because=ALL,
        fidelity="stand-in",
        stands_for="DeepSpeed ZeRO-3; the model's own code is changed, as it would be there",
    ),
    needs=Needs(packages={"torch": ">=2.6"}),  # fully_shard under its public name
    expected_s=(2.4, 0.4),
)
deepspeed_on_cpu = Experiment(
    name="deepspeed",
    control=Arm(partial(zero3, leaf=False), expect=GLOO, because=SOME, fidelity="cpu"),
    treatment=Arm(
        partial(zero3, leaf=True),
        expect=completed(),
        because="the MoE block is a leaf module: ZeRO-3 gathers and reduces all its experts together on every rank",
        fidelity="cpu",
    ),
    needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
    deadline_s=90,
    expected_s=(6, 4),
)

probe = Probe(
    experiments=(gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(")), gloo),
    variants=(deepspeed_on_cpu,),
)
