"""bfloat16 weights lose small updates: rounding discards a step below about 0.2 to 0.4 % of a weight."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable

from kb.cpu_arms import import_deepspeed, without_launcher
from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

SIDE, STEPS, MICRO_BATCHES = 64, 20, 512


def build(ctx: Context, dtype: str, start: float = 0.0) -> Any:
    """A layer whose gradient does not depend on its weights. They start at `start`, or as a language model's do."""
    import torch

    torch.manual_seed(0)
    layer = torch.nn.Linear(SIDE, SIDE, bias=False)
    torch.nn.init.normal_(layer.weight, mean=start, std=0.0 if start else 0.02)
    return layer.to(ctx.device, getattr(torch, dtype))


def step_and_compare(optimizer: Any) -> str:
    """Replaces one optimizer.step() by the test that the entry prints."""
    import torch

    def local(t: Any) -> Any:
        return t.to_local() if hasattr(t, "to_local") else t

    held = [p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.bfloat16]
    held = [p for p in held if p.grad is not None]
    before = [local(p).detach().clone() for p in held]
    trained = [local(p.grad) != 0 for p in held]
    optimizer.step()
    total = sum(int(t.sum()) for t in trained)
    same = sum(int(((local(p) == old) & t).sum()) for p, old, t in zip(held, before, trained))
    if same > total / 2:
        text = "%d of %d bfloat16 weights with a gradient have not changed in a step with lr %g"
        return text % (same, total, optimizer.param_groups[0]["lr"])
    return ""


def values(model: Any) -> Any:
    return [(p.full_tensor() if hasattr(p, "full_tensor") else p).detach().float().clone() for p in model.parameters()]


def run(ctx: Context, model: Any, optimizer: Any, forward: Any = None) -> None:
    import torch

    sample = torch.ones(1, SIDE, device=ctx.device, dtype=next(model.parameters()).dtype)
    old = values(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        (forward or model)(sample).float().sum().backward()
        text = step_and_compare(optimizer)
        if text:
            raise Symptom(text)
    moved = min(float((new - before).abs().mean()) for new, before in zip(values(model), old) if new.numel())
    assert moved > STEPS / 2 * optimizer.param_groups[0]["lr"], moved


def train(ctx: Context, *, dtype: str, lr: float = 1e-5, start: float = 0.0, **fused: bool) -> None:
    """Trains under autocast, with weights of `dtype`."""
    import torch

    model = build(ctx, dtype, start)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, **fused)
    device = ctx.device.type
    ctx.reached()

    def forward(sample: Any) -> Any:
        with torch.autocast(device, dtype=torch.bfloat16):
            return model(sample)

    run(ctx, model, optimizer, forward)


def train_sharded(ctx: Context, *, dtype: str, version: int) -> None:
    """FSDP with a mixed-precision policy. The optimizer trains weights of the dtype they had before the wrapping."""
    import torch

    ctx.init_process_group(timeout_s=15)
    model, policy = build(ctx, dtype), {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ctx.reached()
    if version == 1:
        from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

        model = FullyShardedDataParallel(model, mixed_precision=MixedPrecision(**policy), device_id=ctx.device)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(ctx.device.type, (ctx.world_size,))
        if dtype == "float32":
            assert all(p.dtype == torch.float32 for p in model.parameters())
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    run(ctx, model, torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0))


def train_with_deepspeed(ctx: Context, *, deepspeed: bool) -> None:
    """Trains with torch alone, or with DeepSpeed's bf16, which makes a float32 copy of the weights."""
    import torch

    module = import_deepspeed()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    ctx.init_process_group(timeout_s=20)
    model = build(ctx, "bfloat16", 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    config.update(zero_allow_untested_optimizer=True, gradient_clipping=0.0)
    ctx.reached()
    if not deepspeed:
        run(ctx, model, optimizer)
    model, optimizer, _, _ = module.initialize(model=model, optimizer=optimizer, config=config)
    for _ in range(100):
        model.backward(model(torch.ones(1, SIDE, dtype=torch.bfloat16)).sum())
        model.step()
    dtypes = {p.dtype for group in optimizer.param_groups for p in group["params"]}
    assert abs(values(model)[0].mean() - 0.9) < 0.01 and dtypes == {torch.float32}, dtypes


def accumulate(ctx: Context, *, fixed: bool, deepspeed: bool) -> None:
    """Sums 512 micro-batches whose gradient is 1, and compares the sum with 512."""
    found = accumulate_with_deepspeed(ctx, fixed) if deepspeed else accumulate_with_fsdp1(ctx, fixed)
    if abs(found - MICRO_BATCHES) > 1:
        numbers = (found, MICRO_BATCHES, "deepspeed" if deepspeed else "fsdp1")
        raise Symptom("accumulation in bfloat16: %.3g where %.3g is right, with %s" % numbers)


def accumulate_with_deepspeed(ctx: Context, fixed: bool) -> float:
    import torch

    module = import_deepspeed()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    ctx.init_process_group(timeout_s=20)
    model = build(ctx, "bfloat16")
    torch.nn.init.zeros_(model.weight)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
    config.update(zero_allow_untested_optimizer=True, gradient_clipping=0.0)
    config.update(gradient_accumulation_steps=MICRO_BATCHES)
    if fixed:
        config.update({"data_types": {"grad_accum_dtype": "fp32"}})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model, _, _, _ = module.initialize(model=model, optimizer=optimizer, config=config)
    ctx.reached()
    for _ in range(MICRO_BATCHES):
        model.backward(model(torch.ones(1, SIDE, dtype=torch.bfloat16)).float().sum())
        model.step()
    return float(-values(model)[0].mean().item() * MICRO_BATCHES)  # DeepSpeed divides the gradients


def accumulate_with_fsdp1(ctx: Context, fixed: bool) -> float:
    import contextlib

    import torch
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    ctx.init_process_group(timeout_s=15)
    policy = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    model = FullyShardedDataParallel(
        build(ctx, "float32"), mixed_precision=MixedPrecision(**policy), device_id=ctx.device
    )
    ctx.reached()
    for n in range(MICRO_BATCHES):
        with contextlib.nullcontext() if fixed or n == MICRO_BATCHES - 1 else model.no_sync():
            model(torch.ones(1, SIDE, device=ctx.device)).float().sum().backward()
    return float(max(p.grad.max().item() for p in model.parameters() if p.grad is not None))


def use_trainer(ctx: Context, *, dtype: str) -> None:
    """Runs the Trainer of transformers with bf16=True, which enables autocast and leaves the weights in `dtype`."""
    import torch

    without_launcher()
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Loss(torch.nn.Sequential):  # type: ignore[misc]
        def forward(self, sample: Any) -> Any:
            return {"loss": self[0](sample.to(self[0].weight.dtype)).float().sum()}

    model = Loss(build(ctx, dtype))
    old = values(model)
    data: Any = [{"sample": torch.ones(SIDE)}] * 8
    named: dict[str, Any] = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "max_steps": STEPS}
    args = TrainingArguments(ctx.path("out"), bf16=True, use_cpu=True, learning_rate=1e-5, **named)
    ctx.reached()
    Trainer(model=model, args=args, train_dataset=data).train()
    same, total = int((values(model)[0] == old[0]).sum()), SIDE * SIDE
    if same > 0:
        raise Symptom(
            "%d of %d weights have not changed: %s weights, %d steps of the Trainer" % (same, total, dtype, STEPS)
        )


def add_small_numbers(ctx: Context, *, dtype: str, what: str) -> None:
    """Other sums of small and large numbers: weight decay, Adam's second moment, accumulation, and an average."""
    import torch

    kind = getattr(torch, dtype)
    weight = torch.ones(1, dtype=kind, requires_grad=True)
    ctx.reached()
    if what in ("decay", "states"):
        optimizer = torch.optim.AdamW([weight], lr=1e-3, weight_decay=0.1)
        for step in range(2000):
            weight.grad = torch.full_like(weight, 0.0 if what == "decay" else 100.0 if step < 5 else 0.1)
            optimizer.step()
        found, right = weight.item(), 0.9999**2000
        if what == "states":
            found, right = optimizer.state[weight]["exp_avg_sq"].item(), 50 * 0.999**1995
    elif what == "accumulation":
        for _ in range(512):
            weight.sum().backward()
        found, right = weight.grad.item(), 512.0
    else:
        ema, p, decay = torch.ones(1, dtype=kind), torch.full((1,), 2.0, dtype=torch.bfloat16), 0.999
        if kind == torch.float32:
            assert ema.dtype == torch.float32
        for _ in range(2000):
            ema.lerp_(p.detach().to(ema.dtype), 1 - decay)
        found, right = ema.item(), 2 - decay**2000
    if abs(found - right) > 0.1 * right:
        raise Symptom("%s in %s: %.3g where %.3g is right" % (what, dtype, found, right))


UNCHANGED = symptom(r"\d+ of \d+ bfloat16 weights with a gradient have not changed in a step with lr 1e-05")
NORM = symptom(r"4096 of 4096 bfloat16 weights with a gradient have not changed in a step with lr 0\.001")
TRAINER = symptom(r"\d+ of 4096 weights have not changed: bfloat16")
WRONG_SUM = symptom(r"\w+ in bfloat16: \S+ where \S+ is right")


def pair(name: str, job: Callable[..., None], expect: Any, because: str, fix: str, **given: Any) -> Experiment:
    """`change`: the keyword in which the arms differ, and its two values; by default the dtype of the weights."""
    key, wrong, right = given.pop("change", ("dtype", "bfloat16", "float32"))
    needs = {"torch": ">=2.1", **given.pop("needs", {})}
    library = len(needs) > 1
    return Experiment(
        name=name,
        control=Arm(partial(job, **given, **{key: wrong}), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(partial(job, **given, **{key: right}), expect=completed(), because=fix, fidelity="cpu"),
        needs=Needs(packages=needs),
        world_size=2 if job is train_sharded or (job is accumulate and not given["deepspeed"]) else 1,
        deadline_s=120.0 if library else 30.0,
        expected_s=(8.0, 8.0) if library else (0.5, 0.5),
    )


BF16, FP32 = "the optimizer trains bfloat16 weights", "the optimizer trains float32 weights"
SUMS = {
    "decay": "subtracts a small weight decay from a weight in %s",
    "states": "adds small squared gradients to Adam's second moment in %s",
    "accumulation": "adds the gradients of 512 micro-batches in %s",
    "ema": "updates an average of the weights in %s",
}
DEEPSPEED = {"deepspeed": ">=0.16"}
probe = Probe(
    experiments=(pair("weights", train, UNCHANGED, BF16, FP32 + " under autocast"),),
    variants=(
        pair("norm", train, NORM, BF16 + " of 1.0", FP32, lr=1e-3, start=1.0),
        pair("fused", train, UNCHANGED, BF16 + ", and is fused", FP32, fused=True, needs={"torch": ">=2.5"}),
        pair("fsdp1", train_sharded, UNCHANGED, BF16, FP32, version=1, needs={"torch": ">=2.4"}),
        pair("fsdp2", train_sharded, UNCHANGED, BF16, FP32, version=2, needs={"torch": ">=2.7"}),
        pair(
            "deepspeed",
            train_with_deepspeed,
            NORM,
            BF16,
            "DeepSpeed trains a float32 copy of the bfloat16 weights",
            change=("deepspeed", False, True),
            needs=DEEPSPEED,
        ),
        pair(
            "fsdp1-accumulation",
            accumulate,
            WRONG_SUM,
            "under no_sync, FSDP1 sums the gradients of micro-batches in bfloat16",
            "FSDP1 reduces the gradients of each micro-batch in float32",
            deepspeed=False,
            change=("fixed", False, True),
            needs={"torch": ">=2.4"},
        ),
        pair(
            "deepspeed-accumulation",
            accumulate,
            WRONG_SUM,
            "DeepSpeed sums the gradients of micro-batches in bfloat16",
            "grad_accum_dtype is fp32, so DeepSpeed sums in float32",
            deepspeed=True,
            change=("fixed", False, True),
            needs=DEEPSPEED,
        ),
        pair("trainer", use_trainer, TRAINER, BF16, FP32, needs={"transformers": ">=4.41", "accelerate": ""}),
        *(
            pair(what, add_small_numbers, WRONG_SUM, because % "bfloat16", because % "float32", what=what)
            for what, because in SUMS.items()
        ),
    ),
)
