"""An optimizer was created before sharding replaced the model's parameters, so it updates tensors nobody uses."""

from __future__ import annotations

from functools import partial
from typing import Any, Callable, List

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

STEPS = 3


def build(ctx: Context) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).to(ctx.device)


def check_optimizer(model: Any, *optimizers: Any) -> str:
    """The test that the entry prints, called between backward() and step()."""
    held = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
    trained = [(name, p) for name, p in model.named_parameters() if p.grad is not None]
    lost = [name for name, p in trained if id(p) not in held]
    if lost:
        return "%d of %d tensors with a gradient are in no optimizer, first %s" % (len(lost), len(trained), lost[0])
    assert trained, "no tensor has a gradient"
    return ""


def local_copies(model: Any) -> List[Any]:
    return [(p.to_local() if hasattr(p, "to_local") else p).detach().clone() for p in model.parameters()]


def run(ctx: Context, model: Any, optimizer: Any) -> None:
    """Trains some steps. Raises `Symptom` with the message of the test, and how far all weights moved."""
    import torch

    text, moved, norms = "", 0.0, []
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.ones(2, 4, device=ctx.device)).square().sum().backward()
        text = check_optimizer(model, optimizer)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norms.append(sum(float((g.to_local() if hasattr(g, "to_local") else g).norm()) ** 2 for g in gradients) ** 0.5)
        before = local_copies(model)
        optimizer.step()
        moved += sum(float((old - new).abs().sum()) for old, new in zip(before, local_copies(model)))
    if text:
        numbers = (moved, norms[-1] / norms[0] if norms[0] else 0.0, len(optimizer.state))
        raise Symptom(
            text
            + "; the weights moved by %.1f, gradients are %.1f times the first ones, the optimizer has %d states"
            % numbers
        )
    assert moved > 0.1, moved


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.1)


def make_mesh(ctx: Context) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    ctx.init_process_group(timeout_s=15)
    return init_device_mesh(ctx.device.type, (ctx.world_size,))


def shard(ctx: Context, *, late: bool, way: str) -> None:
    """Shards the model. If `late`, the optimizer is created after the sharding."""
    import torch

    mesh, model, lr = make_mesh(ctx), build(ctx), 10.0 if way == "rate" else 0.1
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    ctx.reached()
    if way in ("fsdp2", "rate"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=mesh)
    elif way == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, use_orig_params=False, device_id=ctx.device)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if late:
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    run(ctx, model, optimizer)


def remap(ctx: Context, *, swap: bool) -> None:
    """The optimizer has two groups with different settings. If `swap`, they receive the new parameters by name."""
    import torch
    from torch.distributed.fsdp import fully_shard

    mesh, model = make_mesh(ctx), build(ctx)
    groups = [{"params": model[0].parameters(), "lr": 0.2}, {"params": model[2].parameters(), "lr": 0.1}]
    optimizer = torch.optim.AdamW(groups)
    ctx.reached()
    assert not optimizer.state, "fix 1: the state is that of the old tensors"
    names = {p: name for name, p in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    if swap:
        new = dict(model.named_parameters())
        for each in optimizer.param_groups:
            each["params"] = [new[names[p]] for p in each["params"]]
    run(ctx, model, optimizer)


def wrap_in_fsdp1(ctx: Context, *, use_orig_params: bool) -> None:
    """Wraps the model in FSDP1 after the optimizer was created."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    ctx.init_process_group(timeout_s=15)
    model = build(ctx)
    optimizer = make_optimizer(model)
    ctx.reached()
    model = FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=ctx.device)
    run(ctx, model, optimizer)


def evaluate(ctx: Context, *, reshard: bool, kept: bool = False) -> None:
    """A forward before the optimizer leaves the outermost unit unsharded, or with `kept` all units."""
    import torch
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh, model = make_mesh(ctx), build(ctx)
    fully_shard(model[0], mesh=mesh, reshard_after_forward=not kept)
    fully_shard(model, mesh=mesh)
    with torch.no_grad():
        model(torch.ones(2, 4))
    ctx.reached()
    if reshard:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
    run(ctx, model, make_optimizer(model))


def replace_parameters(ctx: Context, *, late: bool, way: str) -> None:
    """Replaces parameters without sharding: `to_empty` on a meta model, or `load_state_dict` with assign=True."""
    import torch

    with torch.device("meta" if way == "meta" else "cpu"):
        model = torch.nn.Linear(4, 2)
    optimizer = make_optimizer(model)
    ctx.reached()
    if way == "meta":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.1)
    else:
        model.load_state_dict(torch.nn.Linear(4, 2).state_dict(), assign=True)
    if late:
        optimizer = make_optimizer(model)
    run(ctx, model, optimizer)


def prepare(ctx: Context, *, use_orig_params: Any = False, late: bool = False, fsdp2: bool = False) -> None:
    """Calls accelerate's prepare. accelerate enables FSDP only on accelerators, so the probe sets its state by hand."""
    import torch

    ctx.init_process_group(timeout_s=30)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-not-found]
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-not-found]
    from accelerate.utils import DistributedType  # type: ignore[import-not-found]

    accelerator = Accelerator(cpu=True)
    use_orig_params = None if fsdp2 else use_orig_params
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2 if fsdp2 else 1, use_orig_params=use_orig_params)
    state = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(state)
    AcceleratorState._shared_state.update(state, fsdp_plugin=plugin)
    model, lr = build(ctx), 0.1
    ctx.reached()
    if late:
        model = accelerator.prepare(model)
        optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=lr))
    else:
        model, optimizer = accelerator.prepare(model, make_optimizer(model))
    run(ctx, model, optimizer)


ALL = symptom(
    r"(1 of 1|2 of 2|4 of 4) tensors with a gradient are in no optimizer, first .*moved by 0\.0, .* 3\.0 times"
)
PART = symptom(r"2 of 4 tensors with a gradient are in no optimizer, first 2\.weight")


def pair(name: str, job: Callable[..., None], change: str, because: str, fix: str, **given: Any) -> Experiment:
    """`change`: the keyword that is False in the control arm and True in the treatment arm."""
    needs, expect = {"torch": given.pop("torch", ">=2.1")}, given.pop("expect", ALL)
    if job is prepare:
        needs["accelerate"] = ">=1.15"
    return Experiment(
        name=name,
        control=Arm(partial(job, **given, **{change: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **given, **{change: True}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=needs),
        world_size=1 if job is replace_parameters else 2,
        deadline_s=120.0 if job is prepare else 40.0,
        expected_s=(8.0, 8.0) if job is prepare else (1.0, 1.0),
    )


EARLY = "the optimizer is created first, and then other tensors replace the model's parameters"
LATE = "the optimizer is created last, from the parameters that the model trains"
AFTER_FORWARD = "after a forward, the outermost unit is not resharded when the optimizer is created"
NOT_RESHARDED = "after a forward, no unit is resharded when the optimizer is created"
RESHARDED = "reshard() restores the sharded parameters before the optimizer is created"
TOGETHER = "model and optimizer are prepared together, and FSDP1 makes flat parameters"
FSDP1, FSDP2 = {"torch": ">=2.4"}, {"torch": ">=2.7"}  # these run on the CPU
probe = Probe(
    experiments=(
        pair("fsdp1", shard, "late", EARLY, LATE, way="fsdp1", **FSDP1),
        pair("replaced", replace_parameters, "late", EARLY, LATE, way="meta"),
    ),
    variants=(
        pair("fsdp2", shard, "late", EARLY, LATE, way="fsdp2", **FSDP2),
        pair("tensor-parallel", shard, "late", EARLY, LATE, way="tensor", torch=">=2.6"),
        pair("meta", replace_parameters, "late", EARLY, LATE, way="meta"),
        pair("assign", replace_parameters, "late", EARLY, LATE, way="assign"),
        pair("evaluate", evaluate, "reshard", AFTER_FORWARD, RESHARDED, expect=PART, **FSDP2),
        pair("evaluate-kept", evaluate, "reshard", NOT_RESHARDED, RESHARDED, kept=True, **FSDP2),
        pair(
            "orig",
            wrap_in_fsdp1,
            "use_orig_params",
            "FSDP1 replaces the parameters by flat ones",
            "use_orig_params keeps the parameters",
            **FSDP1,
        ),
        pair("remap", remap, "swap", EARLY, "the optimizer's groups receive the new parameters by name", **FSDP2),
        pair("rate", shard, "late", EARLY + ", and lr is 10", LATE, way="rate", **FSDP2),
        pair("accelerate", prepare, "use_orig_params", TOGETHER, "use_orig_params keeps the parameters", **FSDP1),
        pair(
            "accelerate-late", prepare, "late", TOGETHER, "the model is prepared first, and then the optimizer", **FSDP1
        ),
        pair(
            "accelerate-fsdp2",
            prepare,
            "fsdp2",
            TOGETHER,
            "under FSDP2, accelerate passes the new parameters to the optimizer",
            **FSDP2,
        ),
    ),
)
