"""A run resumes from a checkpoint but restores only a part of it, or in the wrong order: the loss climbs."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from functools import partial
from itertools import islice
from typing import Any, Callable, Dict, List, Mapping, Tuple

from kb.checkpoint import Unreadable, read_checkpoint
from kb.cpu_arms import without_launcher
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
    Unavailable,
    completed,
    exposed,
    symptom,
    unknown,
)

WIDTH, PEAK, STEPS, WATCHED = 256, 0.02, 300, 15
MOST_FILES = 2000
OPTIMIZER_NAMES = ("exp_avg", "momentum_buffer", "optimizer", "optim_state")
# Files of transformers and PEFT that contain only weights, and files next to them that contain no optimizer state.
WEIGHTS = re.compile(r"(model|pytorch_model|adapter_model)(-\d+-of-\d+)?\.(safetensors|bin)")
NEXT_TO_WEIGHTS = re.compile(
    r"(training_args\.bin|(rng_state\w*|scheduler|scaler)\.(pt|pth)|[^/]*\.(json|jinja|txt|md|model))"
)


def batch(step: int) -> Any:
    """Returns the same batch for the same step, so the order of the data plays no part in this incident."""
    import torch

    fixed, random = torch.Generator().manual_seed(7), torch.Generator().manual_seed(step)
    weights = torch.randn(WIDTH, 1, generator=fixed) / WIDTH**0.5
    inputs = torch.randn(64, WIDTH, generator=random)
    return inputs, inputs @ weights + 0.3 * torch.randn(64, 1, generator=random)


def build(seed: int = 0) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.Linear(WIDTH, 1)


def make_optimizer(model: Any) -> Any:
    import torch

    return torch.optim.AdamW(model.parameters(), lr=PEAK)


def make_scheduler(optimizer: Any) -> Any:
    import torch

    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)


def train(model: Any, optimizer: Any, scheduler: Any, steps: range) -> List[float]:
    losses = []
    for step in steps:
        inputs, targets = batch(step)
        loss = (model(inputs) - targets).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


def save(ctx: Context, at: int) -> Tuple[List[float], float]:
    """Trains up to step `at`, saves and trains on. Returns the losses after step `at`, and the learning rate there."""
    import torch

    model = build()
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    train(model, optimizer, scheduler, range(at))
    saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, ctx.path("checkpoint.pt"))
    rate: float = optimizer.param_groups[0]["lr"]
    return train(model, optimizer, scheduler, range(at, at + WATCHED)), rate


def compare(ctx: Context, losses: List[float], expected: List[float], at: int) -> None:
    """Compares each loss with that of the uninterrupted run. The first loss depends on the weights alone."""
    ctx.note(resumed=[round(loss, 3) for loss in losses], uninterrupted=[round(loss, 3) for loss in expected])
    assert abs(losses[0] - expected[0]) < 1e-5, "the model does not have the weights of the checkpoint"
    worst = max(range(len(losses)), key=lambda i: losses[i] / expected[i])
    if losses[worst] > 2 * expected[worst]:
        numbers = (losses[worst], at + worst, expected[worst])
        raise Symptom(
            "the first loss is right, but the loss is %.2f at step %d, and %.2f without the interruption" % numbers
        )


def resume(ctx: Context, *, restores: str, at: int = 240) -> None:
    """`restores`: "weights", "warm-up" (weights, then a rising rate), "no optimizer" (all but its state), or "all"."""
    import torch

    expected, rate = save(ctx, at)
    model = build(seed=1)
    optimizer = make_optimizer(model)
    ctx.reached()
    saved = torch.load(ctx.path("checkpoint.pt"))
    scheduler = make_scheduler(optimizer)
    model.load_state_dict(saved["model"])
    if restores == "all":
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        assert optimizer.param_groups[0]["lr"] == rate
    elif restores == "no optimizer":
        scheduler.load_state_dict(saved["scheduler"])
        for group in optimizer.param_groups:
            group["lr"] = scheduler.get_last_lr()[0]
    elif restores == "warm-up":
        for group, last in zip(optimizer.param_groups, saved["scheduler"]["_last_lr"]):
            group["lr"] = group["initial_lr"] = last
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=1000)
    ctx.note(lr=optimizer.param_groups[0]["lr"], lr_of_checkpoint=rate)
    losses = train(model, optimizer, scheduler, range(at, at + WATCHED))
    compare(ctx, losses, expected, at)
    if restores == "all":
        assert max(abs(loss - other) for loss, other in zip(losses, expected)) < 1e-5, (
            "the losses differ from the uninterrupted run"
        )


def rate_after(steps: int, optimizer: Any, scheduler: Any) -> float:
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def compare_rates(ctx: Context, *, kind: str, restores: str) -> None:
    """Compares the learning rate 20 steps after the resume: some schedules compute each rate from the previous one."""
    import torch
    from torch.optim import lr_scheduler

    def make_scheduler(optimizer: Any) -> Any:
        if kind == "cosine":
            return lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
        parts = [lr_scheduler.LinearLR(optimizer, 0.01, total_iters=20), lr_scheduler.CosineAnnealingLR(optimizer, 280)]
        return lr_scheduler.SequentialLR(optimizer, parts, milestones=[20])

    model = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    rate_after(240, optimizer, scheduler)
    torch.save({"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}, ctx.path("checkpoint.pt"))
    expected = rate_after(20, optimizer, scheduler)
    optimizer = make_optimizer(model)
    ctx.reached()
    saved = torch.load(ctx.path("checkpoint.pt"))
    if restores == "built first":
        scheduler = make_scheduler(optimizer)
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
    elif restores == "built last":
        optimizer.load_state_dict(saved["optimizer"])
        scheduler = make_scheduler(optimizer)
        scheduler.load_state_dict(saved["scheduler"])
    else:
        scheduler = make_scheduler(optimizer)
        scheduler.load_state_dict(saved["scheduler"])
        if restores == "scheduler and rate":
            for group, rate in zip(optimizer.param_groups, scheduler.get_last_lr()):
                group["lr"] = rate
    resumed = rate_after(20, optimizer, scheduler)
    if abs(resumed - expected) > 0.01 * expected:
        raise Symptom(
            "20 steps after the resume the rate is %.1e, and %.1e without the interruption" % (resumed, expected)
        )


def change_total(ctx: Context, *, total: int) -> None:
    """A cosine schedule of 300 steps is a lambda, which is not saved; the resume makes it for `total` steps."""
    import torch

    def make_scheduler(optimizer: Any, total: int) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (1 + math.cos(math.pi * step / total)) / 2)

    model = torch.nn.Linear(2, 2)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, STEPS)
    for _ in range(240):
        optimizer.step()
        scheduler.step()
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer, total)
    ctx.reached()
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    rates = [optimizer.param_groups[0]["lr"]]
    optimizer.step()
    scheduler.step()
    rates.append(optimizer.param_groups[0]["lr"])
    if rates[1] > 2 * rates[0]:
        raise Symptom("the loaded rate is %.1e, and one step later the rate is %.1e" % tuple(rates))
    assert 0.9 * rates[0] < rates[1] < rates[0], rates


def reorder_weights(ctx: Context, *, same_order: bool) -> None:
    """Passes two weights of one shape to the new optimizer, whose `load_state_dict` assigns states by position."""
    import torch

    model = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)})
    optimizer = torch.optim.AdamW([model["a"].weight, model["b"].weight])
    (model["a"].weight.sum() + 100 * model["b"].weight.sum()).backward()
    optimizer.step()
    saved = optimizer.state_dict()
    ctx.reached()
    if same_order:
        named = sorted(model.named_parameters())
    else:
        named = sorted(model.named_parameters(), reverse=True)
    optimizer = torch.optim.AdamW([weight for name, weight in named])
    optimizer.load_state_dict(saved)
    moment = optimizer.state[model["a"].weight]["exp_avg"].mean().item()
    if abs(moment - 0.1) > 0.01:
        raise Symptom("weight a silently received the moment of weight b: %.1f instead of 0.1" % moment)


def resume_average(ctx: Context, *, restored: bool) -> None:
    """The resume creates the average of the weights again. The first update of a new average copies the weights."""
    import torch
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    model = build()
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    ema.update_parameters(model)
    ema_before = ema.module.bias.item()
    saved = {"model": model.state_dict(), "ema": ema.state_dict()}
    torch.nn.init.constant_(model.bias, ema_before + 1.0)  # the average should hardly follow this step
    ctx.reached()
    resumed = build(seed=1)
    ema = AveragedModel(resumed, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    resumed.load_state_dict(saved["model"])
    if restored:
        ema.load_state_dict(saved["ema"])
    ema.update_parameters(model)
    moved = ema.module.bias.item() - ema_before
    if moved > 0.1:
        raise Symptom("the average moved by %.2f in one update, as far as the weights" % moved)
    assert abs(moved - 0.01) < 1e-4, moved


def resume_scaler(ctx: Context, *, restored: bool) -> None:
    """Resumes a float16 run whose gradients need a loss scale of 64. A new GradScaler starts at 65536."""
    import torch

    if not hasattr(torch.amp, "GradScaler"):
        raise Unavailable("torch %s has no GradScaler for the CPU" % torch.__version__)
    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([weight])
    scaler = torch.amp.GradScaler("cpu")
    saved = {**scaler.state_dict(), "scale": 64.0}
    scaler = torch.amp.GradScaler("cpu")
    ctx.reached()
    if restored:
        scaler.load_state_dict(saved)
    skipped = 0
    for _ in range(12):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale((weight.half() * 500).float().sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        skipped += int(torch.equal(before, weight))
    if skipped:
        raise Symptom("the scaler skipped the first %d of 12 steps after the resume" % skipped)


def load_below_master(ctx: Context, *, refreshed: bool) -> None:
    """The optimizer trains a float32 copy of bfloat16 weights. The copy is made before the weights are loaded."""
    import torch

    model = torch.nn.Linear(4, 1, bias=False, dtype=torch.bfloat16)
    masters = [weight.detach().float() for weight in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-3)
    model.load_state_dict({"weight": torch.full((1, 4), 3.0)})
    ctx.reached()
    if refreshed:
        for master, weight in zip(masters, model.parameters()):
            master.data.copy_(weight.data)
    losses = []
    for _ in range(2):
        loss = (model(torch.ones(1, 4, dtype=torch.bfloat16)) - 11).pow(2).mean()
        loss.backward()
        for master, weight in zip(masters, model.parameters()):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        optimizer.step()
        for master, weight in zip(masters, model.parameters()):
            weight.data.copy_(master)
        losses.append(loss.item())
    assert losses[0] == 1.0, losses
    if losses[1] > 10:
        raise Symptom(
            "the first loss is right, 1.0, and the second is %.0f: the step wrote back the old weights" % losses[1]
        )
    assert losses[1] <= 1.0, losses


def number_words(ctx: Context, *, ordered: bool) -> None:
    """Two processes number the same words. The order of strings in a set differs between processes."""
    order = "sorted(words)" if ordered else "list(words)"
    code = "words = set('a quick brown fox jumps over the lazy dog'.split()); print(*%s)" % order
    ctx.reached()
    orders = []
    for seed in ("1", "2"):
        ran = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        orders.append(ran.stdout.split())
    changed = sum(first != second for first, second in zip(*orders))
    if changed:
        raise Symptom("%d of %d words have a different id in the next process" % (changed, len(orders[0])))


def use_trainer(ctx: Context, *, passed_to_train: bool) -> None:
    """Runs the Trainer of transformers on the CPU for four steps, then to step eight from checkpoint-4."""
    import torch

    without_launcher()
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Net(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = build()

        def forward(self, inputs: Any, labels: Any) -> Dict[str, Any]:
            return {"loss": (self.layer(inputs) - labels).pow(2).mean()}

    samples = [{"inputs": inputs, "labels": labels} for inputs, labels in zip(*batch(0))]
    common: Dict[str, Any] = {
        "output_dir": ctx.path("out"),
        "use_cpu": True,
        "report_to": [],
        "save_steps": 4,
        "logging_steps": 1,
        "disable_tqdm": True,
    }
    Trainer(Net(), TrainingArguments(**common, max_steps=4), train_dataset=samples).train()
    checkpoint = ctx.path("out/checkpoint-4")
    ctx.reached()
    if passed_to_train:
        trainer = Trainer(Net(), TrainingArguments(**common, max_steps=8), train_dataset=samples)
        trainer.train(resume_from_checkpoint=checkpoint)
    else:
        arguments = TrainingArguments(**common, max_steps=8, resume_from_checkpoint=checkpoint)
        trainer = Trainer(Net(), arguments, train_dataset=samples)
        trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "loss" in entry]
    if len(steps) == 8 and not passed_to_train:
        raise Symptom("the Trainer ignored the argument and ran steps %d to %d, not 5 to 8" % (steps[0], steps[-1]))
    assert max(entry["step"] for entry in trainer.optimizer.state_dict()["state"].values()) == 8


def use_accelerate(ctx: Context, *, prepared_first: bool) -> None:
    """`load_state` restores the objects that `prepare` has seen, so a call before `prepare` restores nothing."""
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]

    without_launcher()
    accelerator = Accelerator(cpu=True)
    model = build()
    optimizer = make_optimizer(model)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, make_scheduler(optimizer))
    train(model, optimizer, scheduler, range(5))
    accelerator.save_state(ctx.path("state"))
    weight = model.weight.detach().clone()
    accelerator.free_memory()
    model = build(seed=1)
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    folder = ctx.path("state")
    ctx.reached()
    if prepared_first:
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        accelerator.load_state(folder)
    else:
        accelerator.load_state(folder)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    states = len(optimizer.state_dict()["state"])
    if not torch.equal(model.weight, weight):
        raise Symptom("load_state returned, but the weights are new, and the optimizer has %d of 2 states" % states)
    assert states == 2 and scheduler.state_dict()["last_epoch"] == 5


def check(params: Mapping[str, Any]) -> Finding:
    """Does this checkpoint contain optimizer state? The check runs no code from the file."""
    path = params["checkpoint"]
    if path is None:
        return unknown("no checkpoint was named", advice="run --set checkpoint=/path/to/checkpoint-1000")
    order = "kb cannot see whether the script loads it, or in which order"
    if not os.path.isdir(path):
        try:
            names = [tensor.name for tensor in read_checkpoint(path).tensors]
        except Unreadable as error:
            return unknown(str(error))
        found = [name for name in names if any(part in name for part in OPTIMIZER_NAMES)]
        if found:
            return unknown("the checkpoint contains optimizer state, for instance %s" % found[0], order)
        return unknown(
            "%s has %d tensors and no optimizer state; another file may contain it" % (path.name, len(names))
        )
    try:
        files = [file.relative_to(path).as_posix() for file in islice(path.rglob("*"), MOST_FILES)]
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (path, error))
    states = sorted(name for name in files if re.search(r"(^|[/_])optim(izer|_states?)?[^/a-z]", name.lower()))
    if states:
        return unknown("by their names, these files contain optimizer state: %s" % ", ".join(states[:3]), order)
    weights = [name for name in files if WEIGHTS.fullmatch(name)]
    others = [name for name in files if name not in weights and not NEXT_TO_WEIGHTS.fullmatch(name)]
    if not weights or others or len(files) >= MOST_FILES:
        return unknown(
            "the file names in %s do not tell whether it contains optimizer state" % path,
            advice="run --set checkpoint=FILE with one file of the folder",
        )
    return exposed(
        "%s has weights (%s) and no optimizer file" % (path, weights[0]),
        advice="resume from a checkpoint with optimizer state, or let the learning rate rise slowly: Fix 5",
    )


JUMP = symptom(r"the first loss is right, but the loss is 0\.\d\d at step \d+, and 0\.\d\d without the interruption")


def pair(
    name: str,
    job: Callable[..., None],
    keyword: str,
    values: Tuple[Any, Any],  # in the control arm, in the treatment arm
    expect: Expect,
    because: Tuple[str, str],
    **packages: str,
) -> Experiment:
    """Two arms of one job that differ by one keyword."""
    libraries = [package for package in packages if package != "torch"]
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: values[0]}), expect, because[0], "cpu"),
        treatment=Arm(partial(job, **{keyword: values[1]}), completed(), because[1], "cpu"),
        world_size=1,
        needs=Needs(packages=packages),
        deadline_s=90 if libraries else 20,
        expected_s=(8.0, 8.0) if libraries else (1.0, 1.0),
    )


ANY = {"torch": ">=2.1"}
ALL = "builds the scheduler, then loads weights, optimizer and scheduler: every loss equals an uninterrupted run"
WEIGHTS_ONLY = "loads the weights, but the optimizer and the scheduler are new"
WARM_UP = "the moments are new, but the rate rises from 1 % to that of the checkpoint in 1000 steps"
BUILT_LAST = "the scheduler, built after the optimizer was loaded, overwrites the loaded rate"
NO_OPTIMIZER = "loads the scheduler but not the optimizer, which keeps its initial rate"
MOMENTS = "restores the weights and the learning rate, but the moments of AdamW are new"
MASTER = "loads the weights after the float32 copy was made, and the optimizer trains the old copy"

probe = Probe(
    check=check,
    params={"checkpoint": Param("path", "the checkpoint: a folder, or a file written by torch.save or safetensors")},
    experiments=(pair("weights-only", resume, "restores", ("weights", "all"), JUMP, (WEIGHTS_ONLY, ALL), **ANY),),
    variants=(
        pair(
            "order",
            partial(compare_rates, kind="warm-up"),
            "restores",
            ("built last", "built first"),
            symptom(r"20 steps after the resume the rate is 9\.\de-05, and 9\.\de-04 without"),
            (BUILT_LAST, "the scheduler is built before the optimizer is loaded"),
            **ANY,
        ),
        pair(
            "scheduler-alone",
            partial(compare_rates, kind="cosine"),
            "restores",
            ("scheduler", "scheduler and rate"),
            symptom(r"20 steps after the resume the rate is 9\.\de-03, and 8\.\de-04 without"),
            (NO_OPTIMIZER, "writes the rate of the loaded scheduler into the optimizer"),
            **ANY,
        ),
        pair(
            "longer",
            change_total,
            "total",
            (1200, STEPS),
            symptom(r"the loaded rate is 1\.9e-03, and one step later the rate is 1\.8e-02"),
            (
                "the resumed schedule has more total steps, so the rate jumps",
                "the resumed schedule has as many total steps as before",
            ),
            **ANY,
        ),
        pair("moments", partial(resume, at=60), "restores", ("no optimizer", "all"), JUMP, (MOMENTS, ALL), **ANY),
        pair("warm-up", resume, "restores", ("weights", "warm-up"), JUMP, (WEIGHTS_ONLY, WARM_UP), **ANY),
        pair(
            "positions",
            reorder_weights,
            "same_order",
            (False, True),
            symptom(r"weight a silently received the moment of weight b: 10\.0 instead of 0\.1"),
            (
                "passes the weights to the new optimizer in a different order",
                "passes the weights to the optimizer in the same order",
            ),
            **ANY,
        ),
        pair(
            "ema",
            resume_average,
            "restored",
            (False, True),
            symptom(r"the average moved by 1\.00 in one update"),
            ("does not restore the average, which starts again from the weights", "loads the state of the average too"),
            **ANY,
        ),
        pair(
            "scaler",
            resume_scaler,
            "restored",
            (False, True),
            symptom(r"the scaler skipped the first \d+ of 12 steps after the resume"),
            ("creates a new scaler, whose scale is too large", "loads the state of the scaler"),
            torch=">=2.3",
        ),
        pair(
            "master",
            load_below_master,
            "refreshed",
            (False, True),
            symptom(r"the first loss is right, 1\.0, and the second is \d\d+: the step wrote back the old weights"),
            (MASTER, "copies the loaded weights into the float32 copy"),
            **ANY,
        ),
        pair(
            "vocabulary",
            number_words,
            "ordered",
            (False, True),
            symptom(r"\d of \d words have a different id in the next process"),
            ("numbers the words in the order of a set", "numbers the words in sorted order"),
        ),
        pair(
            "trainer",
            use_trainer,
            "passed_to_train",
            (False, True),
            symptom(r"the Trainer ignored the argument and ran steps 1 to 8"),
            (
                "passes resume_from_checkpoint to TrainingArguments, which ignores it",
                "passes the checkpoint to train()",
            ),
            **ANY,
            transformers=">=4.46",
        ),
        pair(
            "accelerate",
            use_accelerate,
            "prepared_first",
            (False, True),
            symptom(r"load_state returned, but the weights are new, and the optimizer has 0 of 2 states"),
            ("calls load_state before prepare, so it restores nothing", "calls load_state after prepare"),
            **ANY,
            accelerate=">=0.30",
        ),
    ),
)
