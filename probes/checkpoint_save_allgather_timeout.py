"""Only rank 0 asks for the full state dict of an FSDP model, which is a collective, as `if rank == 0: save()` does."""

from functools import partial

from kb.probe import Arm, Context, Experiment, Needs, Probe, completed, raised


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


NEEDS_TORCH = {"torch": ">=2.4"}  # fully_shard
GUARDED = "only rank 0 enters the all-gather of the state dict"
EVERYONE = "every rank enters it, rank 0 alone writes"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(save, everyone=False),
        expect=raised(r"Timed out waiting \d+ms for (recv|send) operation"),
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
    ),
)
