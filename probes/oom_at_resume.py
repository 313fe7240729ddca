"""Training from scratch fits; after a resume, each rank has the weights twice or holds the full optimizer state."""

from __future__ import annotations

import gc
import os
import sys
import zlib
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, List, Mapping, Tuple

from kb.cpu_arms import GPU_OOM, HOST_OOM, LIMITED_ADDRESS_SPACE, limit_address_space
from kb.probe import Arm, Context, Experiment, Needs, Probe, completed

MIB = 1 << 20
WIDTH, LAYERS = 1792, 6  # a layer (12 MiB) exceeds the free part of glibc's heap; all weights take 74, a checkpoint 221
WHOLE_ROOM = 418 * MIB  # DDP takes 368 (weights, gradients, buckets, two moments) and some temporaries
PARTS_ROOM = 228 * MIB  # each of two ranks takes 147 and some layers; 37 of weights plus the file are 258
GPU_MIB = 472  # the need of DDP and the workspace of cuBLAS
SAVED_AT, LAST = 1, 2  # steps


def build(ctx: Context, seed: int, *, parts: bool) -> Tuple[Any, Any, Any]:
    """Returns a model under DDP, or with `parts` under FSDP2, AdamW with two groups, and a scheduler."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model: Any = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, device=ctx.device) for _ in range(LAYERS)))
    if parts:
        from torch.distributed.fsdp import fully_shard

        for unit in (*model, model):
            fully_shard(unit)
    else:
        model = nn.parallel.DistributedDataParallel(model)
    weights = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    biases = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 2e-2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), foreach=False)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))


def train(ctx: Context, model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    """Trains these steps; the batch depends on step and rank only."""
    import torch

    for step in steps:
        batch = torch.full((1, WIDTH), 1.0 + step + ctx.rank, device=ctx.device)
        model(batch).square().mean().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()


def held(ctx: Context) -> int:
    """Returns how many MiB this rank has allocated."""
    import torch

    gc.collect()
    if ctx.device.type == "cuda":
        return int(torch.cuda.memory_allocated(ctx.device)) // MIB
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE") // MIB


def digests(model: Any, optimizer: Any, scheduler: Any) -> List[str]:
    """Describes the state of this rank: checksums of weights, moments and steps; groups and schedule as text."""
    import torch

    def digest(tensor: Any) -> str:
        tensor = getattr(tensor, "to_local", lambda: tensor)()
        return hex(zlib.crc32(tensor.detach().cpu().numpy()))

    lines = []
    for parameter in model.parameters():
        state = optimizer.state[parameter]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"} and float(state["step"]) == LAST, state
        lines += [digest(parameter), *(digest(state[name]) for name in sorted(state))]
    for group in optimizer.param_groups:
        lines.append(str([(name, group[name]) for name in ("lr", "initial_lr", "weight_decay", "eps")]))
        lines.append(str(list(group["betas"])))
    assert all(not torch.is_tensor(group["lr"]) for group in optimizer.param_groups)
    return [*lines, str(scheduler.get_last_lr()), str(scheduler.last_epoch)]


def whole(ctx: Context, *, kept: bool) -> None:
    """Runs DDP without interruption, then resumes it; with `kept`, a variable keeps the loaded checkpoint."""
    import torch

    dist = ctx.init_process_group(timeout_s=60)
    dist.all_reduce(torch.ones(1, device=ctx.device))
    torch.set_num_threads(1)
    path = ctx.path("checkpoint.pt")

    def resume(path, model, optimizer, scheduler):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        state = torch.load(path, map_location="cpu")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        return state["step"]

    if ctx.device.type == "cpu":
        limit_address_space(WHOLE_ROOM)
    model, optimizer, scheduler = build(ctx, 0, parts=False)
    train(ctx, model, optimizer, scheduler, range(SAVED_AT))
    if ctx.rank == 0:
        states = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "scheduler": scheduler.state_dict(), "step": SAVED_AT}, path)
        del states
    dist.barrier()
    train(ctx, model, optimizer, scheduler, range(SAVED_AT, LAST))
    before = held(ctx)
    uninterrupted = digests(model, optimizer, scheduler)
    del model, optimizer, scheduler
    gc.collect()
    ctx.reached()
    model, optimizer, scheduler = build(ctx, 1, parts=False)
    if kept:
        checkpoint = torch.load(path, map_location=ctx.device)
        model.module.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
        step = checkpoint["step"]
    else:
        step = resume(path, model.module, optimizer, scheduler)  # type: ignore[no-untyped-call]
    more = held(ctx) - before
    ctx.note(mib_more_after_resume=more)
    if more > 16:
        sys.stderr.write("resumed, this rank holds %d MiB more than without an interruption\n" % more)
    train(ctx, model, optimizer, scheduler, range(step, LAST))
    assert digests(model, optimizer, scheduler) == uninterrupted, "the resumed run differs from the uninterrupted one"
    assert abs(more) <= 16, "this rank holds %d MiB more than in the uninterrupted run" % more


def parts(ctx: Context, *, way: str) -> None:
    """Runs FSDP2 without interruption, then resumes it from a full or a sharded checkpoint, as `way` says.

    Only rank 1 has a limit: on the CPU, host memory and device memory are the same, and rank 0 reads to the host.
    """
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    assert way in ("full", "rank 0", "sharded"), way
    ctx.init_process_group(timeout_s=60).all_reduce(torch.ones(1))
    torch.set_num_threads(1)
    path, folder = ctx.path("checkpoint.pt"), ctx.path("checkpoint")
    if ctx.rank == 1:
        limit_address_space(PARTS_ROOM)
    model, optimizer, scheduler = build(ctx, 0, parts=True)
    step: Any = 0

    def training_state():  # type: ignore[no-untyped-def]  # noqa: ANN202
        weights, moments = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}

    train(ctx, model, optimizer, scheduler, range(step, SAVED_AT))
    step = SAVED_AT
    if way == "sharded":
        dcp.save(training_state(), checkpoint_id=folder)  # type: ignore[no-untyped-call]
    else:
        save_full(ctx, path, model, optimizer, scheduler, step)
    dist.barrier()
    train(ctx, model, optimizer, scheduler, range(step, LAST))
    uninterrupted = digests(model, optimizer, scheduler)
    del model, optimizer, scheduler
    gc.collect()
    ctx.reached()
    model, optimizer, scheduler = build(ctx, 1, parts=True)
    step = 0
    if way == "sharded":
        state = training_state()  # type: ignore[no-untyped-call]
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        step = state["step"]
        del state
    else:
        load = load_on_every_rank if way == "full" else load_on_rank_0
        step = load(ctx, path, model, optimizer, scheduler)
    train(ctx, model, optimizer, scheduler, range(step, LAST))
    assert digests(model, optimizer, scheduler) == uninterrupted, "the resumed run differs from the uninterrupted one"


def save_full(ctx: Context, path: str, model: Any, optimizer: Any, scheduler: Any, step: int) -> None:
    """All ranks gather the full state on the host, and rank 0 saves it."""
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, moments = get_state_dict(model, optimizer, options=options)
    if ctx.rank == 0:
        state = {"model": weights, "optimizer": moments, "scheduler": scheduler.state_dict(), "step": step}
        torch.save(state, path)


def load_on_every_rank(ctx: Context, path: str, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """Each rank loads the full state to its device and takes its shard. Returns the step."""
    import torch
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    options = StateDictOptions(full_state_dict=True)
    state = torch.load(path, map_location=ctx.device)
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    scheduler.load_state_dict(state["scheduler"])
    return state["step"]


def load_on_rank_0(_: Context, path: str, model: Any, optimizer: Any, scheduler: Any) -> Any:
    """Rank 0 reads the full state to the host and sends it tensor by tensor. Returns the step."""
    import torch
    import torch.distributed as dist
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    state: Any
    rest: Any
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    state, rest = {"model": {}, "optimizer": {}}, [None, None]
    if dist.get_rank() == 0:
        state = torch.load(path, map_location="cpu")
        assert all(isinstance(name, str) for name in state["optimizer"]["state"]), "not of get_state_dict"
        rest = [state["scheduler"], state["step"]]
    set_model_state_dict(model, state["model"], options=options)
    set_optimizer_state_dict(model, optimizer, state["optimizer"], options=options)
    dist.broadcast_object_list(rest, src=0)
    scheduler.load_state_dict(rest[0])
    step = rest[1]
    del state
    return step


FSDP2 = {"torch": ">=2.7"}  # fully_shard of older releases does not run on the CPU


def experiment(
    name: str,
    control: Callable[[Context], None],
    treatment: Callable[[Context], None],
    because: Tuple[str, str],
    packages: Mapping[str, str] = MappingProxyType(FSDP2),
    expected_s: Tuple[float, float] = (3.0, 4.0),
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, HOST_OOM, because[0], "stand-in", LIMITED_ADDRESS_SPACE),
        treatment=Arm(treatment, completed(), because[1], "stand-in", LIMITED_ADDRESS_SPACE),
        needs=Needs(packages=packages),
        deadline_s=90,
        expected_s=expected_s,
    )


rlimit = experiment(
    "rlimit",
    partial(whole, kept=True),
    partial(whole, kept=False),
    ("a variable keeps the result of torch.load", "a function loads the checkpoint, which is freed when it returns"),
    packages={"torch": ">=2.1"},
)
FULL = "each rank loads the full weights and optimizer state to its device before it takes its shard"

probe = Probe(
    experiments=(rlimit.on_gpus(2, expect=GPU_OOM, gpu_memory_mib=GPU_MIB), rlimit),
    variants=(
        experiment(
            "full",
            partial(parts, way="full"),
            partial(parts, way="rank 0"),
            (FULL, "rank 0 loads them to the host and sends tensor by tensor"),
        ),
        experiment(
            "sharded",
            partial(parts, way="full"),
            partial(parts, way="sharded"),
            (FULL, "each rank reads its own shard from a sharded checkpoint"),
        ),
    ),
)
