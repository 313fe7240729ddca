"""FSDP accumulates gradients without communication, so each rank holds the gradients of the whole model."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any, Callable, ContextManager, Dict, List, Tuple

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, symptom

LAYERS, WIDTH, ACCUMULATION, STEPS = 8, 16, 3, 2
ALL = LAYERS * WIDTH * WIDTH  # number of weights


def build(ctx: Context) -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS))
    return nn.Sequential(*layers).to(device=ctx.device, dtype=torch.float64)


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-3, foreach=False)


def batch_of(ctx: Context, step: int, number: int, rank: int) -> Any:
    import torch

    torch.manual_seed(100 * step + 10 * number + rank)
    return torch.randn(2, WIDTH, dtype=torch.float64).to(ctx.device)


def loader_of(ctx: Context) -> List[Any]:
    numbers = ((step, number) for step in range(STEPS) for number in range(ACCUMULATION))
    return [batch_of(ctx, step, number, ctx.rank) for step, number in numbers]


def micro_loss(model: Any, batch: Any) -> Any:
    return model(batch).square().mean() / ACCUMULATION


def one_process(ctx: Context) -> List[Any]:
    """The weights after the same steps in one process, with the batches of all ranks."""
    model = build(ctx)
    optimizer = make_optimizer(model)
    for step in range(STEPS):
        for number in range(ACCUMULATION):
            for rank in range(ctx.world_size):
                (micro_loss(model, batch_of(ctx, step, number, rank)) / ctx.world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def compare(model: Any, expected: List[Any]) -> None:
    import torch

    for parameter, reference in zip(list(model.parameters()), expected):
        whole = parameter.detach()
        whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
        torch.testing.assert_close(whole, reference, rtol=0, atol=1e-9)


def shard(model: Any, mesh: Any = None) -> Any:
    from torch.distributed.fsdp import fully_shard

    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def count_reductions() -> Dict[str, int]:
    """Counts from now on the calls of the reductions that FSDP uses; their names differ between releases."""
    import torch.distributed as dist

    names = dict.fromkeys(("reduce_scatter_tensor", "reduce_scatter_single"), "reduce-scatter")
    names["all_reduce"] = "all-reduce"
    calls = dict.fromkeys(names.values(), 0)

    def counted(kind: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            calls[kind] += 1
            return original(*arguments, **options)

        return call

    for name, kind in names.items():
        if hasattr(dist, name):
            setattr(dist, name, counted(kind, getattr(dist, name)))
    return calls


def count_gradients(model: Any) -> int:
    """The number of gradient elements that this rank holds, wherever FSDP stores them."""
    import torch

    gradients = [getattr(parameter.grad, "_local_tensor", parameter.grad) for parameter in model.parameters()]
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        group = getattr(state, "_fsdp_param_group", None)
        for holder in (group, *getattr(group, "fsdp_params", ())):
            names = ("unsharded_accumulated_grad", "_partial_reduce_output")
            gradients += [getattr(holder, name, None) for name in names]
            gradients.append(getattr(getattr(holder, "_unsharded_param", None), "grad", None))
        flat = getattr(getattr(module, "_handle", None), "flat_param", None)
        gradients += [getattr(flat, "_saved_grad_shard", None), getattr(flat, "grad", None)]
    storages = {part.untyped_storage().data_ptr(): part for part in gradients if torch.is_tensor(part) and part.numel()}
    return sum(part.untyped_storage().nbytes() // part.element_size() for part in storages.values())


def judge(ctx: Context, calls: Dict[str, int], most: int, watched: str, shards: int) -> None:
    """Raises `Symptom` if a rank holds more than its shard, or if steps make more than one `watched` call per layer."""
    ctx.note(most=most, of=ALL, calls=calls)
    if watched == "memory":
        if most != ALL // shards:
            raise Symptom(
                "a rank holds %d gradient elements between micro-batches, its shard has %d" % (most, ALL // shards)
            )
    elif calls[watched] != STEPS * LAYERS:
        counts = (calls[watched] // STEPS, watched, LAYERS)
        raise Symptom("each optimizer step makes %d calls of %s, one per layer is %d" % counts)


def train(ctx: Context, model: Any, optimizer: Any, sync: Callable[[bool], ContextManager[Any]]) -> List[int]:
    """The number of gradient elements on this rank after each micro-batch; `sync` gets whether it is the last one."""
    seen = []
    for window in zip(*[iter(loader_of(ctx))] * ACCUMULATION):
        for number, batch in enumerate(window):
            with sync(number == ACCUMULATION - 1):
                micro_loss(model, batch).backward()
            seen.append(count_gradients(model))
        optimizer.step()
        optimizer.zero_grad()
    return seen


def fsdp2(ctx: Context, *, way: str, watched: str = "memory", replicas: int = 1) -> None:
    """fully_shard; `way` says when it reduces: in each micro-batch, in the last, or with all-reduce in the last."""
    from torch.distributed.device_mesh import init_device_mesh

    ctx.init_process_group(timeout_s=60)
    expected, model, shards = one_process(ctx), build(ctx), ctx.world_size // replicas
    mesh = init_device_mesh(ctx.device.type, (replicas, shards), mesh_dim_names=("replicate", "shard"))
    model = shard(model, mesh if replicas > 1 else mesh["shard"])
    optimizer, loader, accumulation = make_optimizer(model), loader_of(ctx), ACCUMULATION
    calls, seen = count_reductions(), [0]
    ctx.reached()

    def loss_of(model: Any, batch: Any) -> Any:
        seen.append(count_gradients(model))  # between two micro-batches
        return micro_loss(model, batch)

    if way == "reduce-scatter":
        for window in zip(*[iter(loader)] * accumulation):  # leaves a shorter last window out
            for number, batch in enumerate(window):
                model.set_requires_all_reduce(number == accumulation - 1)
                loss_of(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    else:

        def sync(last: bool) -> Any:
            if way == "no-sync":
                assert all(parameter.grad is None for parameter in model.parameters())
                model.set_requires_gradient_sync(last)
            return contextlib.nullcontext()

        seen += train(ctx, model, optimizer, sync)
    compare(model, expected)
    judge(ctx, calls, max(seen), watched, shards)


def fsdp1(ctx: Context, *, deferred: bool) -> None:
    """FullyShardedDataParallel with FULL_SHARD; with `deferred`, no_sync skips all reductions but the last."""
    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    ctx.init_process_group(timeout_s=60)
    expected, model = one_process(ctx), build(ctx)
    options: Any = {"device_id": torch.device("cpu"), "use_orig_params": True}
    model = FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({type(model[0])}), **options)
    optimizer = make_optimizer(model)
    calls = count_reductions()
    ctx.reached()

    def sync(last: bool) -> Any:
        return model.no_sync() if deferred and not last else contextlib.nullcontext()

    seen = train(ctx, model, optimizer, sync)
    with FullyShardedDataParallel.summon_full_params(model):
        compare(model, expected)
    judge(ctx, calls, max(seen), "memory", ctx.world_size)


def accelerate(ctx: Context, *, sync_each_batch: bool, version: int) -> None:
    """accumulate() of accelerate, which enables FSDP only on accelerators, so this sets its state by hand."""
    import torch

    ctx.init_process_group(timeout_s=60)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin  # type: ignore[import-not-found]
    from accelerate.state import AcceleratorState, PartialState  # type: ignore[import-not-found]
    from accelerate.utils import DistributedType, GradientAccumulationPlugin  # type: ignore[import-not-found]

    plugin = GradientAccumulationPlugin(num_steps=ACCUMULATION, sync_each_batch=sync_each_batch)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    fsdp: Any = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}
    fsdp["use_orig_params"] = True if version == 1 else None
    state = {"distributed_type": DistributedType.FSDP, "device": torch.device("cpu")}
    PartialState._shared_state.update(state)
    AcceleratorState._shared_state.update(
        state, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version, **fsdp)
    )
    expected, model = one_process(ctx), build(ctx)
    model, optimizer = accelerator.prepare(model, make_optimizer(model))
    calls, most = count_reductions(), 0
    ctx.reached()
    for batch in loader_of(ctx):
        with accelerator.accumulate(model):
            accelerator.backward(micro_loss(model, batch) * ACCUMULATION)  # backward() divides the loss
            most = max(most, count_gradients(model))
            optimizer.step()
            optimizer.zero_grad()
    if version == 1:
        with type(model).summon_full_params(model):
            compare(model, expected)
    else:
        compare(model, expected)
    judge(ctx, calls, most, "memory", ctx.world_size)


def pair(
    name: str, arms: Tuple[Any, Any], because: str, fix: str, expect: Expect, ranks: int = 2, **more: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(arms[0], expect, because, "cpu"),
        treatment=Arm(arms[1], completed(), fix, "cpu"),
        world_size=ranks,
        needs=Needs(packages={"torch": ">=2.7", **more}),
        deadline_s=60,
        expected_s=(3.0, 3.0),
    )


def arms(job: Callable[..., None], key: str, control: Any, treatment: Any, **fixed: Any) -> Tuple[Any, Any]:
    return partial(job, **{key: control}, **fixed), partial(job, **{key: treatment}, **fixed)


FULL = symptom(r"a rank holds 2048 gradient elements between micro-batches, its shard has 1024$")
OF_FOUR = symptom(r"a rank holds 2048 gradient elements between micro-batches, its shard has 512$")
OFTEN = symptom(r"each optimizer step makes 24 calls of reduce-scatter, one per layer is 8$")
REPLICAS = symptom(r"each optimizer step makes 24 calls of all-reduce, one per layer is 8$")
EACH = "FSDP reduces the gradients in each micro-batch"
NO_SYNC = "FSDP reduces the gradients only in the last micro-batch"
LAST = "FSDP runs reduce-scatter in each micro-batch, but all-reduce only in the last"
FSDP2 = arms(fsdp2, "way", "no-sync", "each")
SWITCH = partial(arms, accelerate, "sync_each_batch", False, True)
TRAFFIC = arms(fsdp2, "way", "each", "no-sync", watched="reduce-scatter")
MEMORY = arms(fsdp2, "way", "no-sync", "reduce-scatter", replicas=2)
BETWEEN = arms(fsdp2, "way", "each", "reduce-scatter", watched="all-reduce", replicas=2)
DEFAULT = "accumulate() without sync_each_batch reduces the gradients only in the last micro-batch"
SYNC_EACH = "sync_each_batch=True reduces the gradients in each micro-batch"

HSDP_ON_CPU = ">=2.8"  # torch 2.7.1 asserts in the backward of HSDP without CUDA: all_reduce_event is None

memory = pair("memory", FSDP2, NO_SYNC, EACH, FULL)
probe = Probe(
    experiments=(memory.on_gpus(2, expect=FULL), memory),
    variants=(
        pair("more-ranks", FSDP2, NO_SYNC, EACH, OF_FOUR, ranks=4),
        pair("fsdp1", arms(fsdp1, "deferred", True, False), NO_SYNC, EACH, FULL),
        pair("traffic", TRAFFIC, EACH, NO_SYNC, OFTEN),
        pair("replicas", BETWEEN, EACH, LAST, REPLICAS, ranks=4, torch=HSDP_ON_CPU),
        pair("replicas-memory", MEMORY, NO_SYNC, LAST, FULL, ranks=4, torch=HSDP_ON_CPU),
        pair("accelerate-fsdp1", SWITCH(version=1), DEFAULT, SYNC_EACH, FULL, accelerate=">=1.11"),
        pair("accelerate-fsdp2", SWITCH(version=2), DEFAULT, SYNC_EACH, FULL, accelerate=">=1.11"),
    ),
)
