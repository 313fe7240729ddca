"""Only rank 0 asks for the full state dict of an FSDP model, which is a collective, as `if rank == 0: save()` does."""

from functools import partial

from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Needs, Probe, completed, raised


def save(ctx: Context, *, everyone: bool) -> None:
    import torch
    from torch import nn
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else 2)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16)).to(ctx.device)
    mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.randn(2, 16, device=ctx.device)).sum().backward()
    ctx.reached()
    if everyone or ctx.rank == 0:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if ctx.rank == 0:
            torch.save(state, ctx.path("model.pt"))
            assert torch.load(ctx.path("model.pt"))["0.weight"].shape == (16, 16)
    ctx.meet("saved", timeout_s=15)  # a rank that skipped the gather is alive and busy elsewhere, as in training


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


NEEDS_TORCH = {"torch": ">=2.6"}  # fully_shard is public, before it was torch.distributed._composable.fsdp
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

probe = Probe(
    experiments=(
        gloo.on_gpus(expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(.*ALLGATHER")),
        gloo,
        Experiment(
            name="by-hand",
            control=Arm(
                partial(save_by_hand, everyone=False),
                expect=LATE,
                because=GUARDED,
                fidelity="stand-in",
                stands_for=OF_FSDP,
            ),
            treatment=Arm(
                partial(save_by_hand, everyone=True),
                expect=completed(),
                because=EVERYONE,
                fidelity="stand-in",
                stands_for=OF_FSDP,
            ),
            needs=Needs(packages={"torch": ">=2.1"}),
            expected_s=(2.5, 0.2),
        ),
    ),
)
