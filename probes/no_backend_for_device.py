"""A collective receives a CPU tensor, but the only backend of its process group is for GPUs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)


def join(ctx: Context, *, both: bool) -> Any:
    """Creates a process group for CUDA tensors, or for CUDA and CPU tensors; without a GPU, gloo stands for NCCL."""
    import torch.distributed as dist

    store = dist.FileStore(ctx.path("store"), ctx.world_size)
    options = {"store": store, "rank": ctx.rank, "world_size": ctx.world_size}
    backend = "cuda:nccl"
    if both:
        backend = "cuda:nccl,cpu:gloo"
    if ctx.backend != "nccl":
        backend = backend.replace("nccl", "gloo")
    dist.init_process_group(backend, **options)
    return dist


def reduce(ctx: Context, *, both: bool = False, second_group: bool = False) -> None:
    """Reduces a counter that is still on the CPU."""
    import torch

    dist = join(ctx, both=both)
    correct = torch.tensor([3.0])
    ctx.reached()
    group = None
    if second_group:
        group = dist.new_group(backend="gloo")  # every rank calls it, once, after init_process_group
    dist.all_reduce(correct, group=group)
    assert correct.item() == 3.0 * ctx.world_size, correct
    ctx.meet("reduced")


def sharded(ctx: Context) -> Any:
    """A parameter whose shard and gradient are in host memory, as under FSDP2 with CPU offload."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False))
    weight.grad = DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False)
    return weight


def use_shards(ctx: Context, *, both: bool, call: str) -> None:
    """Clips sharded gradients (`clip`), or gathers a sharded parameter (`gather`)."""
    import torch

    join(ctx, both=both)
    weight = sharded(ctx)
    ctx.reached()
    if call == "clip":
        norm = torch.nn.utils.clip_grad_norm_([weight], max_norm=1.0).full_tensor().item()
        assert abs(norm - 4) < 1e-3, norm  # 16 gradients of 1
    else:
        assert weight.full_tensor().tolist() == [1.0] * 16
    ctx.meet("used")


def save(ctx: Context, *, both: bool) -> None:
    """Saves a checkpoint with async_save, and loads it again."""
    import torch
    import torch.distributed.checkpoint as checkpoint

    join(ctx, both=both)
    state = {"weight": torch.arange(4.0)}
    ctx.reached()
    checkpoint.async_save(state, checkpoint_id=ctx.path("saved")).result()
    loaded = {"weight": torch.zeros(4)}
    checkpoint.load(loaded, checkpoint_id=ctx.path("saved"))
    assert loaded["weight"].tolist() == [0.0, 1.0, 2.0, 3.0], loaded


def wrap(ctx: Context, *, both: bool) -> None:
    """Wraps a model that is still on the CPU; with both backends this is no error, and the model trains on the CPU."""
    import torch

    join(ctx, both=both)
    model = torch.nn.Linear(4, 4)
    ctx.reached()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.device.type == "cpu"


def average(ctx: Context, *, divide: bool) -> None:
    """Averages a loss over the ranks; NCCL has ReduceOp.AVG, but gloo has none up to torch 2.7."""
    import torch

    dist = join(ctx, both=True)
    loss = torch.tensor([3.0 + ctx.rank])
    ctx.reached()
    if divide:
        dist.all_reduce(loss)
        loss = loss / dist.get_world_size()
    else:
        dist.all_reduce(loss, op=dist.ReduceOp.AVG)
    assert loss.item() == 3.5, loss
    ctx.meet("averaged")


def send(ctx: Context, *, converted: bool, kind: str) -> None:
    """Broadcasts an int16 tensor, a sparse tensor, or a sparse buffer of a DDP model, as it is or converted."""
    import torch

    dist = join(ctx, both=True)
    tensor = torch.eye(4).to(torch.int16) if kind == "int16" else torch.eye(4).to_sparse()
    ctx.reached()
    if converted:
        tensor = tensor.to_dense() if tensor.is_sparse else tensor.to(torch.int32)
    if kind == "buffer":
        module = torch.nn.Linear(4, 4)
        module.register_buffer("adjacency", tensor)
        torch.nn.parallel.DistributedDataParallel(module)
    try:
        dist.broadcast(tensor, src=0)
    except NotImplementedError as error:  # its text is pages long
        raise Symptom(str(error)[:120]) from None
    assert tensor.sum().item() == 4, tensor


def compute(ctx: Context, *, both: bool) -> None:
    """Computes a torchmetrics metric on the CPU, which gathers its state from all ranks."""
    import torchmetrics  # type: ignore[import-not-found]

    join(ctx, both=both)
    metric = torchmetrics.MeanMetric()
    metric.update(float(ctx.rank))
    ctx.reached()
    assert metric.compute().item() == 0.5
    ctx.meet("computed")


# --- the check: an accelerate configuration with FSDP2 and CPU offload, and a release that starts only nccl -----------


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration use FSDP2 with CPU offload, with an accelerate that starts only nccl?"""
    from kb.training_config import UnreadableConfig, read_config

    if params["config"] is None:
        return unknown("kb needs your configuration; it does not read code", advice="run kb check --config FILE")
    try:
        values = read_config(Path(params["config"])).values
    except (UnreadableConfig, OSError, ValueError, RecursionError) as error:
        return unknown(str(error))
    fsdp = values.get("fsdp_config")
    fsdp = fsdp if isinstance(fsdp, dict) else {}
    if fsdp.get("fsdp_offload_params") not in (True, "true", "True") or fsdp.get("fsdp_version") not in (2, "2"):
        return unknown("this file has no FSDP2 with fsdp_offload_params; kb does not read the code")
    kind = values.get("distributed_type")
    if (kind is not None and str(kind).upper() != "FSDP") or values.get("use_cpu") in (True, "true", "True"):
        return unknown("this file has fsdp_config, but the job does not use FSDP on GPUs")
    installed = release("accelerate")
    if not installed:
        why = "the job uses FSDP2 with fsdp_offload_params, but this interpreter has no accelerate"
        return unknown(why, advice="run this with --python PATH, the interpreter of the job")
    evidence = "the job uses FSDP2 with fsdp_offload_params, and accelerate %d.%d starts" % installed[:2]
    if installed < (1, 9):
        advice = "use accelerate>=1.9, or InitProcessGroupKwargs(backend=...), unless the code has it already"
        return exposed(evidence + " only nccl", advice=advice)
    return unknown(evidence + " nccl and gloo; kb does not see a group that the code starts itself")


NO_BACKEND = r"No backend type associated with device type cpu"
SPARSE = r"c10d::broadcast_' with arguments from the 'SparseCPU' backend"
STANDS_FOR = (
    "a group of NCCL; gloo is registered for CUDA tensors, and torch chooses the backend by device in both cases"
)
ONE, BOTH = "the group has a backend only for CUDA tensors", "the group has gloo for CPU tensors too"
IN_VAIN = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}


def pair(
    name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, keyword: str, **changes: Any
) -> Experiment:
    """An experiment whose job gets `keyword=False` in the control arm and `keyword=True` in the treatment."""
    off, on = partial(job, **{keyword: False}), partial(job, **{keyword: True})
    control = Arm(off, expect, because, "stand-in", STANDS_FOR, env=IN_VAIN)
    return Experiment(name, control, Arm(on, completed(), fix, "stand-in", STANDS_FOR, env=IN_VAIN), **changes)


both = partial(pair, expect=raised(NO_BACKEND), because=ONE, fix=BOTH, keyword="both")
single = partial(pair, keyword="converted", world_size=1)
SAVES = Needs(packages={"torch": ">=2.3"})
OLD, SHARDS = Needs(packages={"torch": ">=2.2,<2.8"}), Needs(packages={"torch": ">=2.5"})
metric = both("metric", reduce)
probe = Probe(
    check=check,
    params={"config": Param("path", "an accelerate configuration")},
    experiments=(metric.on_gpus(), metric),
    variants=(
        both("clip", partial(use_shards, call="clip"), needs=SHARDS),
        both("gather", partial(use_shards, call="gather"), needs=SHARDS),
        both(
            "async-save", save, expect=raised("A CPU backend must be enabled for async save"), world_size=1, needs=SAVES
        ),
        both("ddp", wrap, world_size=1),
        both("second-group", reduce, fix="the counter is reduced in a second group, of gloo", keyword="second_group"),
        pair(
            "average",
            average,
            raised("ReduceOp.AVG with Gloo"),
            "the code uses ReduceOp.AVG, which this gloo does not have",
            "the code sums the losses and divides by the number of ranks",
            "divide",
            needs=OLD,
        ),
        single(
            "sparse",
            partial(send, kind="sparse"),
            symptom(SPARSE),
            "the broadcast gets a sparse tensor",
            "the tensor is converted to a dense one",
        ),
        single(
            "buffer",
            partial(send, kind="buffer"),
            raised("No support for sparse tensors"),
            "the DDP model has a sparse buffer",
            "the buffer is converted to a dense one",
        ),
        single(
            "type",
            partial(send, kind="int16"),
            raised("Invalid scalar type"),
            "the broadcast gets an int16 tensor, which gloo does not support",
            "the tensor is converted to int32",
        ),
        both("torchmetrics", compute, needs=Needs(packages={"torch": ">=2.2", "torchmetrics": ">=1.0"})),
    ),
)
