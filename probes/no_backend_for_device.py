"""A collective of a CPU tensor in a group whose only backend is for GPUs."""

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
    """A group for CUDA tensors, or for both. Without a GPU gloo has the place of NCCL in it."""
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
    """A counter of the loop, which nobody moved to the GPU."""
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
    """A parameter whose shard and gradient are in host memory, as FSDP2 leaves them with CPU offload."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (ctx.world_size,))
    weight = torch.nn.Parameter(DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False))
    weight.grad = DTensor.from_local(torch.ones(8), mesh, [Shard(0)], run_check=False)
    return weight


def use_shards(ctx: Context, *, both: bool, call: str) -> None:
    """Clip sharded gradients, or gather a sharded parameter."""
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
    """The model was not moved. With both backends that is no error: it trains on the CPU."""
    import torch

    join(ctx, both=both)
    model = torch.nn.Linear(4, 4)
    ctx.reached()
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert model.weight.grad is not None and model.weight.grad.device.type == "cpu"


def average(ctx: Context, *, divide: bool) -> None:
    """Up to torch 2.7 gloo has no average, which NCCL has."""
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
    except NotImplementedError as error:  # pages of text
        raise Symptom(str(error)[:120]) from None
    assert tensor.sum().item() == 4, tensor


def compute(ctx: Context, *, both: bool) -> None:
    import torchmetrics  # type: ignore[import-not-found]

    join(ctx, both=both)
    metric = torchmetrics.MeanMetric()
    metric.update(float(ctx.rank))
    ctx.reached()
    assert metric.compute().item() == 0.5
    ctx.meet("computed")


# --- the check: an accelerate configuration with FSDP2 and CPU offload, and a release that starts nccl alone ----------


def check(params: Mapping[str, Any]) -> Finding:
    from kb.training_config import UnreadableConfig, read_config

    if params["config"] is None:
        return unknown("no configuration was given, and code is not read", advice="kb check --config FILE")
    try:
        values = read_config(Path(params["config"])).values
    except (UnreadableConfig, OSError, ValueError, RecursionError) as error:
        return unknown(str(error))
    fsdp = values.get("fsdp_config")
    fsdp = fsdp if isinstance(fsdp, dict) else {}
    if fsdp.get("fsdp_offload_params") not in (True, "true", "True") or fsdp.get("fsdp_version") not in (2, "2"):
        return unknown("no FSDP2 with fsdp_offload_params in this file; the code is not read")
    kind = values.get("distributed_type")
    if (kind is not None and str(kind).upper() != "FSDP") or values.get("use_cpu") in (True, "true", "True"):
        return unknown("fsdp_config is there, and the job is not one of FSDP on GPUs by this file")
    installed = release("accelerate")
    if not installed:
        return unknown("FSDP2 with fsdp_offload_params, and no accelerate in this interpreter", advice="--python PATH")
    said = "FSDP2 with fsdp_offload_params, accelerate %d.%d" % installed[:2]
    if installed < (1, 9):
        advice = "accelerate>=1.9, or InitProcessGroupKwargs(backend=...), unless the code has it already"
        return exposed(said + " starts nccl alone", advice=advice)
    return unknown(said + " starts both; a group that the code starts itself is not seen")


NONE = r"No backend type associated with device type cpu"
AVERAGE = r"Cannot use ReduceOp\.AVG with Gloo"
SPARSE = r"c10d::broadcast_' with arguments from the 'SparseCPU' backend"
FOR = "a group of NCCL: gloo, registered for CUDA tensors; torch looks for the backend by the device either way"
ONE, BOTH = "the group has a backend for CUDA tensors only", "it has gloo for CPU tensors too"
IN_VAIN = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}


def pair(
    name: str, job: Callable[..., None], expect: Expect, because: str, fix: str, keyword: str, **changes: Any
) -> Experiment:
    """`keyword` is off in the control arm and on in the treatment."""
    off, on = partial(job, **{keyword: False}), partial(job, **{keyword: True})
    control = Arm(off, expect, because, "stand-in", FOR, env=IN_VAIN)
    return Experiment(name, control, Arm(on, completed(), fix, "stand-in", FOR, env=IN_VAIN), **changes)


both = partial(pair, expect=raised(NONE), because=ONE, fix=BOTH, keyword="both")
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
        both("second-group", reduce, fix="a second group, of gloo", keyword="second_group"),
        pair(
            "average",
            average,
            raised("ReduceOp.AVG with Gloo"),
            "AVG",
            "a sum, divided",
            "divide",
            needs=OLD,
        ),
        single("sparse", partial(send, kind="sparse"), symptom(SPARSE), "a sparse tensor", "made dense"),
        single("buffer", partial(send, kind="buffer"), raised("No support for sparse tensors"), "sparse", "dense"),
        single("type", partial(send, kind="int16"), raised("Invalid scalar type"), "int16 on gloo", "int32"),
        both("torchmetrics", compute, needs=Needs(packages={"torch": ">=2.2", "torchmetrics": ">=1.0"})),
    ),
)
