"""One rank has a value that float16 cannot hold: all ranks skip every step while the loss scale halves."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Mapping

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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import UnreadableConfig, read_config

STEPS = 20
WHYS = ("overflow", "nan", "no-scaling")
FIXES = ("bfloat16", "in-range", "scaling", "small-scale")


def build_model(half: Any, factor: float) -> Any:
    """Returns a linear classifier that computes logits in `half`; its forward returns the loss times `factor`."""
    import torch
    from torch.nn.functional import cross_entropy, linear

    class Model(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(2, 8))

        def forward(self, x: Any) -> Any:
            logits = linear(x.to(half), self.weight.to(half))
            return cross_entropy(logits.float(), torch.zeros(4, dtype=torch.long, device=x.device)) * factor

    return Model()


def train(
    ctx: Context,
    *,
    fixed: bool,
    why: str = "",
    fix: str = "",
    dtype: str = "float16",
    scale: float = 65536.0,
    fixed_scale: bool = False,
    deepspeed_scaler: bool = False,
) -> None:
    """Trains under DDP on two ranks with float32 weights and a layer in half precision; only rank 1 has bad data."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=20)
    why, fix = why or ctx.params["why"], (fix or ctx.params["fix"]) if fixed else ""
    half = torch.bfloat16 if fix == "bfloat16" else getattr(torch, dtype)
    in_range = fix == "in-range"
    x = torch.ones(4, 8, device=ctx.device)
    if ctx.rank == 1 and why != "no-scaling" and not in_range:
        x[0] = 10000.0 if why == "overflow" else float("nan")  # eight add up to 80000; float16 ends at 65504
    tiny = 1e-8 if why == "no-scaling" and not in_range else 1.0  # gradients of 1e-9; float16 begins at 6e-8
    model = DistributedDataParallel(build_model(half, tiny).to(ctx.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5 if x[0].max() > 1 else 0.01 / tiny)
    scaled = half == torch.float16 and (why != "no-scaling" or fix == "scaling")
    step: Any = TorchScaler(ctx, scaled, 8.0 if fix == "small-scale" else scale, fixed_scale)
    if deepspeed_scaler and half == torch.float16:
        step = DeepSpeedScaler(ctx)
    ctx.reached()
    losses, unchanged, first = [], 0, step.scale()
    for _ in range(STEPS):
        before = model.module.weight.detach().clone()
        optimizer.zero_grad()
        losses.append(model(x))
        step(losses[-1], optimizer)
        unchanged += torch.equal(before, model.module.weight)
    ctx.note(first_loss=losses[0].item(), last_loss=losses[-1].item(), unchanged=unchanged, loss_scale=step.scale())
    broken = int(model.module.weight.isnan().sum())
    if broken:
        raise Symptom(f"{STEPS - unchanged} of {STEPS} steps were taken, {broken} of 16 weights are nan")
    if unchanged == STEPS:
        raise Symptom(
            f"{STEPS} of {STEPS} steps changed no weight, the loss scale went from {first:g} to {step.scale():g}"
        )
    assert losses[-1] < losses[0] * 0.999, f"the loss went from {losses[0].item()} to {losses[-1].item()}"


def call(ctx: Context, *, in_float32: bool) -> None:
    """Trains a module under autocast that produces values above 65504; `in_float32` disables autocast in it."""
    import torch

    device = ctx.device

    class Head(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.proj = torch.nn.Linear(8, 2, bias=False)
            torch.nn.init.ones_(self.proj.weight)

        def forward(self, hidden: Any) -> Any:
            if in_float32:
                with torch.autocast(device.type, enabled=False):
                    hidden = self.proj(hidden.float())
            else:
                hidden = self.proj(hidden)
            return hidden.float().softmax(-1)

    head = Head().to(device)
    optimizer = torch.optim.SGD(head.parameters(), lr=1e-5)
    step = TorchScaler(ctx, True, 65536.0, False)
    ctx.reached()
    before = head.proj.weight.detach().clone()
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=torch.float16):
            output = head(torch.full((4, 8), 10000.0, device=device))  # eight add up to 80000
        step(-output[:, 0].log().mean(), optimizer)
    if torch.equal(before, head.proj.weight):
        raise Symptom(f"{STEPS} of {STEPS} steps changed no weight, the loss scale went from 65536 to {step.scale():g}")


class TorchScaler:
    """Scales the loss and steps with torch's GradScaler; `fixed_scale` keeps the scale."""

    def __init__(self, ctx: Context, enabled: bool, first: float, fixed_scale: bool) -> None:
        import torch

        self.fixed_scale = fixed_scale
        self.scaler = torch.amp.GradScaler(ctx.device.type, enabled=enabled, init_scale=first)

    def __call__(self, loss: Any, optimizer: Any) -> None:
        self.scaler.scale(loss).backward()
        self.scaler.step(optimizer)
        self.scaler.update(self.scaler.get_scale() if self.fixed_scale else None)

    def scale(self) -> float:
        return float(self.scaler.get_scale())


class DeepSpeedScaler:
    """Calls DeepSpeed's own scaler as its optimizers do, with the defaults of its fp16 section."""

    def __init__(self, ctx: Context) -> None:
        import torch

        module: Any = importlib.import_module("deepspeed.runtime.fp16.loss_scaler")
        module.dist = SimpleNamespace(get_rank=lambda: ctx.rank)  # it needs the rank only for its log
        defaults = {"init_scale": 2**16, "scale_window": 1000, "min_scale": 1, "delayed_shift": 2}
        defaults["consecutive_hysteresis"] = False
        self.scaler = module.CreateLossScaler(torch.float16, 0, True, defaults)

    def __call__(self, loss: Any, optimizer: Any) -> None:
        (loss * self.scaler.loss_scale).backward()
        gradients = [weight.grad for group in optimizer.param_groups for weight in group["params"]]
        overflow = not all(gradient.isfinite().all() for gradient in gradients)
        self.scaler.update_scale(overflow)
        for gradient in gradients:
            gradient /= self.scaler.loss_scale
        if not overflow:
            optimizer.step()

    def scale(self) -> float:
        return float(self.scaler.loss_scale)


def check(params: Mapping[str, Any]) -> Finding:
    """Does the configuration train a model in float16 that was saved in bfloat16?"""
    if params["config"] is None:
        return unknown("no configuration was named", advice="run --set config=ds.json --set model=FOLDER")
    try:
        kind, values = read_config(params["config"])
    except UnreadableConfig as error:
        return unknown(str(error))
    if not any(key in values for key in ("fp16", "bf16", "mixed_precision")):
        return unknown(f"{params['config']} ({kind}) sets no precision, so the script decides")
    section = values.get("fp16")
    section = section if isinstance(section, dict) else {"enabled": section}
    enabled = section.get("enabled") or values.get("mixed_precision") == "fp16"
    if not enabled or str(enabled).lower() in ("false", "no"):
        bf16 = values.get("bf16")
        bf16 = bf16.get("enabled") if isinstance(bf16, dict) else bf16
        line = f"{params['config']} ({kind}) does not switch float16 on"
        if kind != "accelerate" and (section.get("enabled") is False or bf16 is True):  # the file says so explicitly
            return clear(line, "kb assumes that the job reads this file and sets no other precision")
        return unknown(line, "the script, or arguments such as --fp16, may still do so")
    message = [f"{params['config']} ({kind}): fp16 {enabled}"]
    if section.get("loss_scale"):
        message.append(
            f"loss_scale {section['loss_scale']} is fixed, so overflowing steps are skipped without an error"
        )
    advice = "use bf16 if nvidia-smi --query-gpu=compute_cap --format=csv prints 8.0 or higher"
    if str(enabled).lower() != "true":  # such as "auto"
        return unknown(*message, "the arguments of the trainer decide whether float16 is on", advice=advice)
    if params["model"] is None:
        return unknown(*message, "run --set model=FOLDER to see in which precision the model was saved", advice=advice)
    try:
        model = json.loads((params["model"] / "config.json").read_text())
        saved = str(model.get("dtype") or model.get("torch_dtype"))
    except (OSError, ValueError, AttributeError) as error:
        return unknown(*message, f"kb cannot read {params['model']}/config.json: {error}", advice=advice)
    message.append(f"{params['model']}/config.json: the weights were saved in {saved}")
    if saved.endswith("bfloat16"):
        return exposed(*message, "nothing kept its activations below 65504", advice=advice)
    return unknown(*message, "no file shows whether its activations stay below 65504", advice=advice)


HALVES = "float16 cannot hold a value on rank 1, at any loss scale (other causes: --set why=nan or no-scaling)"
HOLDS = "the same step with a fix: bfloat16, or that of --set fix=in-range, scaling or small-scale"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train, fixed=False),
        expect=symptom(r"20 of 20 steps changed no weight, the loss scale went from \d+ to"),
        because=HALVES,
        fidelity="cpu",
    ),
    treatment=Arm(partial(train, fixed=True), expect=completed(), because=HOLDS, fidelity="cpu"),
    needs=Needs(packages={"torch": ">=2.3"}),
    expected_s=(0.3, 0.3),
)

NOTHING = symptom(r"20 of 20 steps changed no weight, the loss scale went from \S+ to")


def variant(name: str, because: str, remedy: str, expect: Expect = NOTHING, **keywords: Any) -> Experiment:
    """Returns a variant; only the treatment arm applies `fix`, one of the keywords."""
    control, treatment = partial(train, fixed=False, **keywords), partial(train, fixed=True, **keywords)
    return replace(
        gloo,
        name=name,
        control=Arm(control, expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(treatment, expect=completed(), because=remedy, fidelity="cpu"),
    )


variants = (
    variant(
        "nan-bfloat16",
        "the data of rank 1 has a nan, and in bfloat16 nothing skips the step",
        "the data has no nan, still in bfloat16",
        symptom(r"20 of 20 steps were taken, 16 of 16 weights are nan"),
        why="nan",
        fix="in-range",
        dtype="bfloat16",
    ),
    variant(
        "nan",
        "the data of rank 1 has a nan",
        "the data has no nan, still in float16 with a scaler",
        why="nan",
        fix="in-range",
    ),
    variant(
        "small-scale",
        "the scaler starts at 8, but float16 cannot hold a value",
        "the scaler starts at 8, and the values are in range",
        why="overflow",
        fix="in-range",
        scale=8.0,
    ),
    variant(
        "fixed-scale",
        "the scale is fixed at 8, but float16 cannot hold a value",
        "the scale is fixed at 8, and the values are in range",
        why="overflow",
        fix="in-range",
        scale=8.0,
        fixed_scale=True,
    ),
    variant(
        "no-scaling",
        "the job has no scaler, and the gradients are below the smallest number of float16",
        "the job has a GradScaler",
        why="no-scaling",
        fix="scaling",
    ),
    Experiment(
        name="float32-module",
        control=Arm(
            partial(call, in_float32=False),
            expect=NOTHING,
            because="a module under float16 autocast computes 80000",
            fidelity="cpu",
        ),
        treatment=Arm(
            partial(call, in_float32=True),
            expect=completed(),
            because="autocast is off in this module, and its input is float32",
            fidelity="cpu",
        ),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.3"}),
        expected_s=(0.2, 0.2),
    ),
)

probe = Probe(
    check=check,
    params={
        "why": Param("str", "what goes wrong: %s" % ", ".join(WHYS), "overflow"),
        "fix": Param("str", "what the treatment arm does: %s" % ", ".join(FIXES), "bfloat16"),
        "config": Param("path", "your DeepSpeed JSON, accelerate YAML or training arguments, for the check"),
        "model": Param("path", "the folder of your model with its config.json, for the check"),
    },
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        *variants,
        Experiment(
            name="deepspeed",
            control=Arm(
                partial(train, fixed=False, deepspeed_scaler=True),
                expect=raised(r"Current loss scale already at minimum - cannot decrease scale anymore"),
                because=f"the job uses DeepSpeed's scaler with its defaults, and {HALVES}",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(train, fixed=True, deepspeed_scaler=True), expect=completed(), because=HOLDS, fidelity="cpu"
            ),
            needs=Needs(packages={"torch": ">=2.3", "deepspeed": ">=0.10"}, memory_mib=2048),
            deadline_s=60,
            expected_s=(4, 1),
        ),
    ),
)
