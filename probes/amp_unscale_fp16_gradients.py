"""A GradScaler unscales gradients of float16 weights, or steps an optimizer whose parameters have no gradients."""

from functools import partial
from typing import Any, Callable

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom


def build(ctx: Context) -> Any:
    """A frozen layer and a trainable one, both in float16; the trainable weights are 1."""
    import torch

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)).half().to(ctx.device)
    model[0].requires_grad_(False)
    torch.nn.init.ones_(model[1].weight)
    return model


def train(
    ctx: Context, *, float32: bool, clips: bool = True, scaler: str = "on", fused: bool = False, adam: bool = False
) -> None:
    """One step of mixed precision with learning rate 1e-4; the gradient is about 1, or about 1e-4 with AdamW."""
    import torch

    model = build(ctx)
    if float32:
        for p in model.parameters():
            if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
                p.data = p.data.float()
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer_class: Any = torch.optim.AdamW if adam else torch.optim.SGD
    optimizer = optimizer_class(trainable, lr=1e-4, **({"fused": True} if fused else {}))
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
    assert model[0].weight.dtype == torch.float16, "the frozen layer is no longer in half precision"
    if not model[1].weight.isfinite().all():
        raise Symptom("%d of 8 weights are infinite after a step" % int(model[1].weight.isinf().sum()))
    changed = int((model[1].weight != 1).sum())
    if changed < 8:
        raise Symptom("%d of 8 weights changed in a step" % changed)


def train_bfloat16(ctx: Context, *, bfloat16: bool) -> None:
    """Trains float32 weights with autocast to bfloat16 and no scaler, or float16 weights with a scaler."""
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


def bfloat16_without_scaler(ctx: Context, *, float32: bool, large: bool = False, fused: bool = False) -> None:
    """Autocast to bfloat16 with trainable weights in float16, or in float32; nothing raises.

    The gradient is 1e-4, or 1 if `large`.
    """
    import torch

    model = build(ctx)
    if float32:
        for p in model.parameters():
            if p.requires_grad and p.dtype in (torch.float16, torch.bfloat16):
                p.data = p.data.float()
    optimizer = torch.optim.AdamW(model[1].parameters(), lr=1e-4, **({"fused": True} if fused else {}))
    ctx.reached()
    for _ in range(3):
        with torch.autocast(ctx.device.type, dtype=torch.bfloat16):
            hidden = model[0](torch.ones(3, 4, device=ctx.device))
            loss = model[1](hidden * 0 + 1).float().sum() / (3 if large else 3e4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bad = int((~model[1].weight.isfinite()).sum())
    if bad:
        raise Symptom("%d of 8 weights are no numbers after three steps" % bad)
    changed = int((model[1].weight != 1).sum())
    if changed < 8:
        raise Symptom("%d of 8 weights changed in three steps" % changed)


def step_without_gradients(ctx: Context, *, fixed: bool, how: str) -> None:
    """No parameter of the optimizer has a gradient when the scaler steps it, for one of four reasons."""
    import copy

    import torch

    model = torch.nn.Linear(4, 2).to(ctx.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler: Any = torch.amp.GradScaler(ctx.device.type)
    if how == "stale":
        model = copy.deepcopy(model)  # new parameters, as a loader, a wrapper or a conversion creates them
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
    """`keyword` is False in the control and True in the treatment."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: False}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **{keyword: True}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages={"torch": ">=2.4" if "fused" in name else ">=2.3"}),  # scaler and fused steps on the CPU
        world_size=1,
        expected_s=(0.4, 0.4),
    )


cpu = pair("cpu", train, "float32", UNSCALE, "unscale_ before clipping rejects gradients of float16 weights")

probe = Probe(
    experiments=(cpu.on_gpus(1, name="gpu", expected_s=(10, 10)), cpu),
    variants=(
        pair(
            "no-clip",
            partial(train, clips=False),
            "float32",
            UNSCALE,
            "without clipping, the scaler's step unscales and rejects gradients of float16 weights",
        ),
        pair(
            "patched",
            partial(train, scaler="patched"),
            "float32",
            LOST,
            "the scaler is patched to allow float16, but float16 weights round the update away",
        ),
        pair(
            "patched-adam",
            partial(train, scaler="patched", adam=True),
            "float32",
            symptom(r"8 of 8 weights are infinite after a step"),
            "the scaler is patched to allow float16, in which AdamW's eps is 0, so it divides by 0",
        ),
        pair(
            "no-scaler",
            partial(train, scaler="off"),
            "float32",
            LOST,
            "without a scaler nothing raises, but float16 weights round the update away",
        ),
        pair(
            "fused",
            partial(train, clips=False, fused=True),
            "float32",
            LOST,
            "with a fused optimizer and no clipping nothing raises, but float16 weights round the update away",
        ),
        pair(
            "bfloat16",
            train_bfloat16,
            "bfloat16",
            UNSCALE,
            "unscale_ before clipping rejects gradients of float16 weights",
            "the weights are in float32, with autocast to bfloat16 and no scaler",
        ),
        pair(
            "bf16-over-float16",
            bfloat16_without_scaler,
            "float32",
            symptom(r"8 of 8 weights are no numbers after three steps"),
            "autocast to bfloat16 with float16 weights does not raise, but AdamW's eps is 0 in float16",
        ),
        pair(
            "bf16-large-gradients",
            partial(bfloat16_without_scaler, large=True),
            "float32",
            symptom(r"0 of 8 weights changed in three steps"),
            "autocast to bfloat16 with float16 weights does not raise, but the weights round the update away",
        ),
        pair(
            "bf16-fused",
            partial(bfloat16_without_scaler, fused=True),
            "float32",
            symptom(r"0 of 8 weights changed in three steps"),
            "fused AdamW computes in float32, so nothing becomes NaN, but float16 weights round the update away",
        ),
        pair(
            "stale",
            partial(step_without_gradients, how="stale"),
            "fixed",
            NOTHING,
            "the optimizer still has the parameters of a model that was replaced",
            "the script creates the optimizer after the model is replaced",
        ),
        pair(
            "zeroed",
            partial(step_without_gradients, how="zeroed"),
            "fixed",
            NOTHING,
            "the script calls zero_grad between backward and step",
            "the script calls zero_grad before the backward",
        ),
        pair(
            "idle",
            partial(step_without_gradients, how="idle"),
            "fixed",
            NOTHING,
            "one of two optimizers steps in an iteration whose loss does not use its model",
            "the optimizer steps only if the loss uses its model",
        ),
        pair(
            "detached",
            partial(step_without_gradients, how="detached"),
            "fixed",
            NOTHING,
            "the loss is detached from the model, so the backward reaches no parameter",
            "the loss is not detached from the model",
        ),
    ),
)
