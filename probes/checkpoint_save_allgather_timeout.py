"""Only rank 0 asks for the full state dict of an FSDP model, which is a collective, as `if rank == 0: save()` does."""

from functools import partial
from typing import Any, Callable

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


def save(ctx: Context, *, everyone: bool) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    path = ctx.path("model.pt")
    model = of_fsdp2(ctx)
    model(torch.randn(2, 16, device=ctx.device)).sum().backward()
    ctx.reached()
    if everyone or ctx.rank == 0:
        assert not any(hasattr(weight, "ds_id") for weight in model.parameters())
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
        if ctx.rank == 0:
            assert torch.load(path)["0.weight"].shape == (16, 16)
    ctx.meet("saved", timeout_s=15)  # a rank that skipped the gather is alive and busy elsewhere, as in training


def plain(ctx: Context) -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(ctx.device)


def of_fsdp2(ctx: Context) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = plain(ctx)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def of_fsdp1(ctx: Context) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(plain(ctx), device_id=ctx.device)


def of_zero3(ctx: Context) -> Any:
    """What DeepSpeed leaves outside of a module's forward: parameters without elements."""
    model = plain(ctx)
    for parameter in model.parameters():
        parameter.data = parameter.data.new_empty(0)
    return model


def save_by_hand(ctx: Context, *, everyone: bool) -> None:
    """The same guard around a gather of our own: each rank has one half of the rows."""
    import torch

    dist = ctx.init_process_group(timeout_s=2)
    shard = torch.full((8, 16), float(ctx.rank))
    ctx.reached()
    if everyone or ctx.rank == 0:
        rows = [torch.empty_like(shard) for _ in range(ctx.world_size)]
        dist.all_gather(rows, shard)
        if ctx.rank == 0:
            torch.save(torch.cat(rows), ctx.path("model.pt"))
            assert torch.load(ctx.path("model.pt"))[:, 0].tolist() == [0.0] * 8 + [1.0] * 8
    ctx.meet("saved", timeout_s=15)


def decide(ctx: Context, *, together: bool, timeout_s: float = 2) -> None:
    """Each rank saves, in a gather of halves, if the loss is a new best one: its own, or that of all."""
    import torch

    dist = ctx.init_process_group(timeout_s=timeout_s)
    loss, best = torch.tensor([1.0 + 4 * ctx.rank]), 2.0
    ctx.reached()
    if together:
        dist.all_reduce(loss)  # every rank has the sum; dist.reduce leaves it on one
        loss = loss / dist.get_world_size()
    if loss.item() < best:
        rows = [torch.empty(8, 16) for _ in range(ctx.world_size)]
        dist.all_gather(rows, torch.ones(8, 16))
    ctx.meet("decided", timeout_s=15)


def write_slowly(ctx: Context, *, patient: bool) -> None:
    """All gather, then rank 0 writes to storage that takes 4 s; the next step has a timeout of 2 s."""
    import io
    import time
    from datetime import timedelta

    import torch

    class Storage(io.BytesIO):
        def write(self, data: Any) -> int:
            if not self.tell():
                time.sleep(4)
            return super().write(data)

    dist = ctx.init_process_group(timeout_s=2)
    saving = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
    rows = [torch.empty(8, 16) for _ in range(ctx.world_size)]
    path = Storage()
    ctx.reached()
    dist.all_gather(rows, torch.ones(8, 16))
    state = {"weight": torch.cat(rows)}
    if dist.get_rank() == 0:
        torch.save(state, path)
    if patient:
        dist.barrier(group=saving)
    dist.all_gather(rows, torch.ones(8, 16))  # the next step
    assert (path.tell() > 0) == (ctx.rank == 0), path.tell()


def save_shards(ctx: Context, *, sharded: Callable[[Context], Any], everyone: bool) -> None:
    """torch.distributed.checkpoint: each rank writes its own half of the rows, and takes part in the planning."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    dist = ctx.init_process_group(timeout_s=2)
    path, model = ctx.path("checkpoint"), sharded(ctx)
    ctx.reached()
    if everyone or dist.get_rank() == 0:
        state = {"model": get_model_state_dict(model)}
        dcp.save(state, storage_writer=dcp.FileSystemWriter(path))
    ctx.meet("saved", timeout_s=15)
    if ctx.rank == 0:
        saved: Any = dcp.FileSystemReader(path).read_metadata().state_dict_metadata["model.0.weight"]
        if saved.size.numel() == 0:
            raise Symptom(f"the save raised nothing, and 0.weight in it is {tuple(saved.size)}")
        assert (tuple(saved.size), len(saved.chunks)) == ((16, 16), ctx.world_size), saved


NEEDS_TORCH = {"torch": ">=2.7"}  # FSDP2 on the CPU: a stream of 2.6 has no record_event
OF_FSDP = "get_model_state_dict of an FSDP model, which gathers its shards in an all-gather as well"
GUARDED = "only rank 0 enters the all-gather of the state dict"
EVERYONE = "every rank enters it, rank 0 alone writes"

LATE = raised(GLOO_TIMEOUT)

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(save, everyone=False),
        expect=LATE,
        because=GUARDED,
        fidelity="cpu",
    ),
    treatment=Arm(partial(save, everyone=True), expect=completed(), because=EVERYONE, fidelity="cpu"),
    needs=Needs(packages=NEEDS_TORCH),
    expected_s=(3.3, 0.3),
)


def variant(
    name: str, job: Callable[..., None], change: str, because: str, fix: str, torch: str = ">=2.2", **both: Any
) -> Experiment:
    """`change` is the keyword of the job that is the fix; the save is a gather of halves, in place of FSDP's."""
    control, treatment = partial(job, **{change: False}, **both), partial(job, **{change: True}, **both)
    return Experiment(
        name=name,
        control=Arm(control, expect=LATE, because=because, fidelity="stand-in", stands_for=OF_FSDP),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="stand-in", stands_for=OF_FSDP),
        needs=Needs(packages={"torch": torch}),
        expected_s=(2.5, 0.5),
    )


def shards(name: str, sharded: Callable[[Context], Any], torch: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            partial(save_shards, sharded=sharded, everyone=False),
            expect=LATE,
            because="only rank 0 calls torch.distributed.checkpoint.save",
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(save_shards, sharded=sharded, everyone=True),
            expect=completed(),
            because="every rank calls it and writes its part",
            fidelity="cpu",
        ),
        needs=Needs(packages={"torch": torch}),
        expected_s=(3.5, 2.5),
    )


probe = Probe(
    experiments=(
        gloo.on_gpus(
            expect=raised(rf"Watchdog caught collective operation timeout: WorkNCCL\(.*ALLGATHER|{NCCL2_TIMEOUT}")
        ),
        gloo,
        variant("by-hand", save_by_hand, "everyone", GUARDED, EVERYONE, torch=">=2.1"),
    ),
    variants=(
        variant(
            "decision",
            decide,
            "together",
            "each rank decides by its own loss whether to save, with a longer timeout",
            "all ranks decide by the mean of their losses",
            timeout_s=3,
        ),
        variant(
            "slow-write",
            write_slowly,
            "patient",
            "all gather, rank 0 writes for longer than the timeout, the others wait in the next step",
            "the others wait in a gloo group of their own, whose timeout is for storage",
        ),
        shards("shards", of_fsdp2, ">=2.6"),
        shards("shards-fsdp1", of_fsdp1, ">=2.2"),
        Experiment(
            name="empty",
            control=Arm(
                partial(save_shards, sharded=of_zero3, everyone=True),
                expect=symptom(r"the save raised nothing, and 0\.weight in it is \(0,\)"),
                because="the parameters are placeholders without elements, as ZeRO-3 leaves them",
                fidelity="stand-in",
                stands_for="DeepSpeed, which is not a dependency: its placeholders are made by hand",
            ),
            treatment=Arm(
                partial(save_shards, sharded=of_fsdp1, everyone=True),
                expect=completed(),
                because="the same save of an FSDP model",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.2"}),
            expected_s=(2.5, 2.5),
        ),
    ),
)
