"""The batch size and the accumulation are set per process, so with more ranks a step averages more samples."""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any, List, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)
from kb.training_config import BATCHES, UnreadableConfig, read_config

SAMPLES, EPOCHS, BATCH = 64, 4, 4  # the recipe of one rank: 64 optimizer steps of 4 samples
ADVICE = "run --set config=NOW.yaml --set processes=8 --set recipe=BEFORE.yaml --set recipe_processes=1"
UNSUPPORTED = r"auto_|accelerator|parallelism|elastic|global_|batch_size|split_|scale_|\w+_parallel|.p_size"
HALF = r"32 optimizer steps of 8 samples, loss [^;]+; the recipe has 64 of 4, loss \d"
KEPT = "each of two ranks keeps the batch of one rank, so a step averages twice as many samples"
SPLIT = "the batch or the accumulation is divided by the number of ranks, so the steps are those of one rank"


def recipe(build_optimizer: Any, batch: int, reduction: str = "mean") -> Tuple[Any, Any, Any]:
    """The data, an untrained model, and the model after one rank has trained it, with one batch per optimizer step."""
    import torch
    from torch.nn.functional import mse_loss

    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 4, generator=generator)
    targets = inputs @ torch.tensor([[1.0], [-2.0], [3.0], [0.5]]) + 0.1 * torch.randn(SAMPLES, 1, generator=generator)
    model, fresh = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
    for weight in (*model.parameters(), *fresh.parameters()):
        torch.nn.init.zeros_(weight)
    optimizer = build_optimizer(model.parameters())
    for _ in range(EPOCHS):
        for features, labels in zip(inputs.split(batch), targets.split(batch)):
            optimizer.zero_grad()
            mse_loss(model(features), labels, reduction=reduction).backward()
            optimizer.step()
    return torch.utils.data.TensorDataset(inputs, targets), fresh, model


def compare(model: Any, recipe_model: Any, data: Any, steps: int, batch: int, recipe_batch: int) -> None:
    """Raises `Symptom` unless the model is as good as the recipe's.

    With the same global batch the weights must be equal to rounding, with another one the loss about as low.
    """
    import torch

    features, labels = data.tensors
    loss, recipe_loss = ((net(features) - labels).square().mean().item() for net in (model, recipe_model))
    same = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(model.parameters(), recipe_model.parameters()))
    if not (same if batch == recipe_batch else loss < 1.3 * recipe_loss):
        numbers = (steps, batch, loss, EPOCHS * SAMPLES // recipe_batch, recipe_batch, recipe_loss)
        raise Symptom("%d optimizer steps of %d samples, loss %.4g; the recipe has %d of %d, loss %.4g" % numbers)


def train(
    ctx: Context, *, keeps_global: bool = False, scales_rate: bool = False, times_ranks: bool = False, **settings: Any
) -> None:
    """Trains the recipe of one rank on two ranks with DDP, for as many epochs."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, DistributedSampler

    dist = ctx.init_process_group(timeout_s=20)
    learning_rate, reduction = settings.get("learning_rate", 0.01), settings.get("reduction", "mean")
    accumulation = settings.get("accumulation", 1)
    build = partial(getattr(torch.optim, settings.get("optimizer", "SGD")), lr=learning_rate)
    recipe_ranks, per_gpu_batch, recipe_batch = 1, BATCH, BATCH * accumulation
    data, model, recipe_model = recipe(build, recipe_batch, reduction)
    world_size = dist.get_world_size()  # of the data-parallel group
    global_batch = recipe_batch if keeps_global else recipe_batch * world_size
    if keeps_global:
        per_rank, rest = divmod(global_batch, world_size)
        assert per_rank > 0 and rest == 0, f"{global_batch} is no multiple of {world_size} ranks"
        accumulation = next(n for n in range(1, per_rank + 1) if per_rank % n == 0 and per_rank // n <= per_gpu_batch)
        per_gpu_batch = per_rank // accumulation
    if scales_rate:
        growth = global_batch / recipe_batch
        learning_rate *= growth
    ddp = torch.nn.parallel.DistributedDataParallel(model.to(ctx.device))
    optimizer = build(ddp.parameters(), lr=learning_rate)
    loader: Any = DataLoader(data, batch_size=per_gpu_batch, sampler=DistributedSampler(data, shuffle=False))
    ctx.reached()
    steps = 0
    for _ in range(EPOCHS):
        for number, (features, labels) in enumerate(loader, 1):
            loss = mse_loss(ddp(features.to(ctx.device)), labels.to(ctx.device), reduction=reduction)
            if times_ranks:
                loss = loss * dist.get_world_size() / recipe_ranks
            (loss / accumulation).backward()
            if number % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
    compare(ddp.module.cpu(), recipe_model, data, steps, per_gpu_batch * accumulation * world_size, recipe_batch)


def count_steps(ctx: Context, *, fewer_steps: bool = True, shorter_warmup: bool = True) -> None:
    """Runs with the numbers of steps and warm-up steps that were chosen for one rank."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    recipe_batch, global_batch = BATCH, BATCH * dist.get_world_size()
    max_steps, warmup_steps = EPOCHS * SAMPLES // BATCH, 40
    if fewer_steps:
        max_steps = max_steps * recipe_batch // global_batch
    if shorter_warmup:
        warmup_steps = warmup_steps * recipe_batch // global_batch
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup_steps))
    ctx.reached()
    rates, samples = [], torch.zeros(1)
    for _ in range(max_steps):
        samples += BATCH  # samples that this rank has read
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    dist.all_reduce(samples)
    passes = samples.item() / SAMPLES
    if passes != EPOCHS:
        raise Symptom("%d optimizer steps read the data %.1f times; %d epochs were meant" % (max_steps, passes, EPOCHS))
    if max(rates) < 1:
        raise Symptom("warm-up of %d of %d optimizer steps: %.2f of the rate" % (warmup_steps, max_steps, max(rates)))


def fit(ctx: Context, *, per_device: int) -> None:
    """Trains with the Trainer of transformers on two ranks, with plain SGD and the samples in order."""
    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    ctx.init_process_group(timeout_s=30)
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class SequentialTrainer(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return torch.nn.functional.mse_loss(model(inputs["features"]), inputs["labels"])

    options = {"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options.update(report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False)
    options.update(num_train_epochs=EPOCHS, per_device_train_batch_size=per_device, output_dir=ctx.path("out"))
    data, model, recipe_model = recipe(partial(torch.optim.SGD, lr=0.01), BATCH)
    samples = [{"features": features, "labels": labels} for features, labels in data]
    trainer = SequentialTrainer(model, TrainingArguments(**options), train_dataset=samples)
    ctx.reached()
    trainer.train()
    compare(model, recipe_model, data, trainer.state.global_step, per_device * ctx.world_size, BATCH)


def rate_of(kind: str, values: Any) -> Optional[float]:
    """The learning rate as a number, or None if the file does not give it."""
    for key in ("optimizer", "params", "lr") if kind == "deepspeed" else ("learning_rate",):
        values = values.get(key) if isinstance(values, dict) else None
    try:
        return float(values)
    except (TypeError, ValueError, OverflowError):
        return None


def global_batch_of(path: Any, processes: Optional[int]) -> Tuple[int, str, Optional[float]]:
    """Samples per optimizer step, a line that explains them, and the learning rate.

    Raises `UnreadableConfig` if the file does not determine the number of samples.
    """
    kind, values = read_config(path)
    unsupported = [
        key for key in values if re.match(UNSUPPORTED, key) and str(values[key]) not in ("None", "False", "1")
    ]
    if unsupported:
        raise UnreadableConfig("%s sets %s, which kb does not judge" % (path, " and ".join(sorted(unsupported))))
    total = values.get("train_batch_size")
    if kind == "deepspeed" and type(total) is int and 0 < total < 1 << 31:
        return total, "%s: train_batch_size is %d for all ranks" % (path, total), rate_of(kind, values)
    numbers: List[Any] = [next((values[key] for key in BATCHES if key in values), None)]
    numbers += [values.get("gradient_accumulation_steps"), processes]
    if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers):
        raise UnreadableConfig("%s: kb needs the batch per device, gradient_accumulation_steps and processes" % path)
    line = "%s: batch %d x accumulation %d x %d ranks" % (path, *numbers)
    return numbers[0] * numbers[1] * numbers[2], line, rate_of(kind, values)


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the global batch of this job with that of the recipe."""
    if params["config"] is None:
        return unknown("kb needs the configuration of this job and of the recipe", advice=ADVICE)
    try:
        now, line, rate = global_batch_of(params["config"], params["processes"])
        recipe_file = params["recipe"] or params["config"]
        before, recipe_line, recipe_rate = global_batch_of(recipe_file, params["recipe_processes"])
    except UnreadableConfig as error:
        return unknown(str(error), advice=ADVICE)
    lines = ("this job: %d samples per step, %s" % (now, line), "the recipe: %d, %s" % (before, recipe_line))
    if now == before:
        return clear(*lines)
    if rate is None or rate != recipe_rate:
        return unknown(*lines, "learning rates: %s and %s; kb does not know whether they fit" % (rate, recipe_rate))
    advice = "keep the recipe's samples per step; an epoch now has %.3g times its optimizer steps" % (before / now)
    return exposed(*lines, advice=advice)


def pair(
    name: str,
    job: Any,
    keyword: str,
    pattern: str = HALF,
    because: str = KEPT,
    fix: str = SPLIT,
    values: Any = (False, True),
) -> Experiment:
    """An experiment on two ranks whose arms differ in one keyword; `values` are those of control and treatment."""
    library = {"transformers": ">=4.46"} if job is fit else {}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: values[0]}), symptom(pattern), because, "cpu"),
        treatment=Arm(partial(job, **{keyword: values[1]}), completed(), fix, "cpu"),
        needs=Needs(packages={"torch": ">=2.1", **library}),
        deadline_s=60 if library else 30,
        expected_s=(5.0, 5.0) if library else (1.0, 1.0),
    )


GLOO = pair("gloo", train, "keeps_global")
SUMMED = r"64 optimizer steps of 4 samples, loss [2-9]\S+ the recipe has 64 of 4, loss 1\."
SUM = partial(train, reduction="sum", keeps_global=True, learning_rate=0.01 / BATCH)
HIGH_RATE = partial(train, learning_rate=0.45)
STEPS = "the job keeps the number of steps that was chosen for one rank"
DIVIDED = "the number of steps is divided by the growth of the global batch"
probe = Probe(
    check=check,
    params={
        "config": Param("path", "the configuration of this job"),
        "processes": Param("int", "data-parallel ranks of this job"),
        "recipe": Param("path", "the configuration that the learning rate was chosen for, if it is a different file"),
        "recipe_processes": Param("int", "data-parallel ranks of the job that the learning rate was chosen for"),
    },
    experiments=(GLOO.on_gpus(), GLOO),
    variants=(
        pair("accumulation", partial(train, accumulation=2), "keeps_global", r"16 optimizer steps of 16 .+ 32 of 8,"),
        pair("adamw", partial(train, optimizer="AdamW", learning_rate=0.03), "keeps_global"),
        pair(
            "summed",
            SUM,
            "times_ranks",
            SUMMED,
            "the loss is a sum, and DDP averages the sums over the ranks",
            "the loss is multiplied by the number of ranks",
        ),
        pair("rate", train, "scales_rate", fix="the learning rate is multiplied by the number of ranks"),
        pair(
            "too-far",
            HIGH_RATE,
            "scales_rate",
            HALF,
            "the learning rate is near its limit, and is doubled",
            "the learning rate stays as it was",
            (True, False),
        ),
        pair("max-steps", count_steps, "fewer_steps", r"read the data 8\.0 times; 4 epochs were meant", STEPS, DIVIDED),
        pair("warm-up", count_steps, "shorter_warmup", r"warm-up of 40 of 32 optimizer steps", STEPS, DIVIDED),
        pair("trainer", fit, "per_device", values=(BATCH, BATCH // 2)),
    ),
)
