"""A GradScaler meets trainable weights in float16, or an optimizer none of whose parameters has a gradient."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    """A frozen layer and a trainable one, all loaded in float16; the trainable weights are 1."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).half().to(ctx.device)
    model[0].requires_grad_(False)
    torch.nn.init.ones_(model[1].weight)
    return model


def train(
    ctx: Context, *, float32: bool, clips: bool = True, scaler: str = "on", fused: bool = False, adam: bool = False
) -> None:
    """One step of mixed precision with a learning rate of 1e-4, and a gradient of about 1, for AdamW of 1e-4."""
    import torch

    model = build(ctx)
    if float32:
        for p in model.parameters():
            if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
                p.data = p.data.float()
    trainable = [p for p in model.parameters() if p.requires_grad]
    how: Any = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = how(trainable, lr=1e-4, **({"fused": True} if fused else {}))
    amp: Any = torch.amp.GradScaler(ctx.device.type, init_scale=64.0, enabled=scaler != "off")
    if scaler == "patched":
        unscale = amp._unscale_grads_
        amp._unscale_grads_ = lambda *arguments: unscale(*arguments[:3], True)
    batch = torch.ones(3, 4, device=ctx.device)
    ctx.reached()
    with torch.autocast(ctx.device.type, dtype=torch.float16):
        hidden = model[0](batch)
        loss = (model[1](hidden * 0 + 1)).float().sum() / (3e4 if adam else 3)
    amp.scale(loss).backward()
    if clips:
        amp.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trainable, 10.0)
    amp.step(optimizer)
    amp.update()
    assert model[0].weight.dtype == torch.float16, "the frozen layer stays in half precision"
    if not model[1].weight.isfinite().all():
        raise Symptom("%d of 8 weights are infinite after a step" % int(model[1].weight.isinf().sum()))
    changed = int((model[1].weight != 1).sum())
    if changed < 8:
        raise Symptom("%d of 8 weights changed in a step" % changed)


def train_bfloat16(ctx: Context, *, bfloat16: bool) -> None:
    """Weights in float32 that are used in bfloat16, without a scaler; or the float16 ones with it."""
    import torch

    if not bfloat16:
        return train(ctx, float32=False)
    model = build(ctx).float()
    assert all(p.dtype == torch.float32 for p in model.parameters() if p.requires_grad)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-4)
    ctx.reached()
    with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
        loss = model(torch.ones(3, 4, device=ctx.device)).float().sum()
    loss.backward()
    optimizer.step()
    assert int((model[1].weight != 1).sum()) == 8, model[1].weight
    return None


def bfloat16_without_scaler(ctx: Context, *, float32: bool) -> None:
    """bf16 is switched on over weights that were loaded in float16: nothing raises."""
    import torch

    model = build(ctx)
    if float32:
        for p in model.parameters():
            if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
                p.data = p.data.float()
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-4)
    ctx.reached()
    for _ in range(3):
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            hidden = model[0](torch.ones(3, 4, device=ctx.device))
            loss = model[1](hidden * 0 + 1).float().sum() / 3e4
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bad = int((~model[1].weight.isfinite()).sum())
    if bad:
        raise Symptom("%d of 8 weights are no numbers after three steps" % bad)
    assert int((model[1].weight != 1).sum()) == 8, model[1].weight


def step_without(ctx: Context, *, fixed: bool, how: str) -> None:
    """No parameter of the optimizer has a gradient when it steps."""
    import copy

    import torch

    model = torch.nn.Linear(4, 2).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = torch.amp.GradScaler(ctx.device.type)
    if how == "stale":
        model = copy.deepcopy(model)  # as a loader, a wrapper or a conversion makes new parameters
        if fixed:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.nn.Linear(4, 2).to(ctx.device)
    before = [p.detach().clone() for p in model.parameters()]
    used = other if how == "idle" else model
    ctx.reached()
    if how == "zeroed" and fixed:
        optimizer.zero_grad()
    loss = used(torch.ones(3, 4, device=ctx.device)).sum()
    if how == "detached" and not fixed:
        loss = loss.detach().requires_grad_()
    scaler.scale(loss).backward()
    if how == "zeroed" and not fixed:
        optimizer.zero_grad()
    if how == "idle" and fixed:
        if used is model:
            scaler.step(optimizer)
    else:
        scaler.step(optimizer)
    if how != "idle":
        scaler.update()
        assert all((p != old).all() for p, old in zip(model.parameters(), before))  # Python 3.9


UNSCALE = raised(r"Attempting to unscale FP16 gradients")
NOTHING = raised(r"No inf checks were recorded for this optimizer")
LOST = symptom(r"0 of 8 weights changed in a step")


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    expect: Expect,
    because: str,
    fix: str = "the trainable weights are in float32",
) -> Experiment:
    """`keyword` is off in the control arm and on in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.4" if name == "fused" else ">=2.3"}),  # scaler and fused steps on the CPU
        world_size=1,
        expected_s=(0.4, 0.4),
    )


cpu = pair("cpu", train, "float32", UNSCALE, "trainable weights in float16, unscaled for clipping")

probe = Probe(
    experiments=(cpu.on_gpus(1, name="gpu", expected_s=(10, 10)), cpu),
    variants=(
        pair("no-clip", partial(train, clips=False), "float32", UNSCALE, "no clipping: the scaler's step unscales"),
        pair(
            "patched",
            partial(train, scaler="patched"),
            "float32",
            LOST,
            "the scaler is patched to allow float16, and the weights round the update away",
        ),
        pair(
            "patched-adam",
            partial(train, scaler="patched", adam=True),
            "float32",
            symptom(r"8 of 8 weights are infinite after a step"),
            "the scaler is patched to allow float16, where the eps of AdamW is 0",
        ),
        pair(
            "no-scaler",
            partial(train, scaler="off"),
            "float32",
            LOST,
            "no scaler, and the float16 weights round the update away",
        ),
        pair(
            "fused",
            partial(train, clips=False, fused=True),
            "float32",
            LOST,
            "a fused optimizer without clipping: nothing raises, and the update is rounded away",
        ),
        pair(
            "bfloat16",
            train_bfloat16,
            "bfloat16",
            UNSCALE,
            "trainable weights in float16 and a scaler",
            "weights in float32, autocast to bfloat16, no scaler",
        ),
        pair(
            "bf16-over-float16",
            bfloat16_without_scaler,
            "float32",
            symptom(r"8 of 8 weights are no numbers after three steps"),
            "bf16 over trainable weights in float16, AdamW",
        ),
        pair(
            "stale",
            partial(step_without, how="stale"),
            "fixed",
            NOTHING,
            "the optimizer has the parameters of the model before it was replaced",
            "it is made afterwards",
        ),
        pair(
            "zeroed",
            partial(step_without, how="zeroed"),
            "fixed",
            NOTHING,
            "zero_grad between backward and step",
            "zero_grad before the backward",
        ),
        pair(
            "idle",
            partial(step_without, how="idle"),
            "fixed",
            NOTHING,
            "the second of two optimizers steps in an iteration that does not use its model",
            "it steps in the branch of its own loss only",
        ),
        pair(
            "detached",
            partial(step_without, how="detached"),
            "fixed",
            NOTHING,
            "the loss is a new leaf",
            "the loss depends on the model",
        ),
    ),
)
