"""Batch, accumulation, rate and steps are set per process: with more ranks a step averages more samples."""

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
ADVICE = "--set config=NOW.yaml --set processes=8 --set recipe=BEFORE.yaml --set recipe_processes=1"
UNJUDGED = r"auto_|accelerator|parallelism|elastic|global_|batch_size|split_|scale_|\w+_parallel|.p_size"
HALF = r"32 optimizer steps of 8 samples, loss [^;]+; the recipe has 64 of 4, loss \d"
KEPT = "each of two ranks keeps the batch of one, and a step averages twice as many samples"
SPLIT = "batch or accumulation is divided by the ranks: the same steps as on one"


def recipe(build_optimizer: Any, batch: int, reduction: str = "mean") -> Tuple[Any, Any, Any]:
    """Data, an untrained model, and the model that one rank with one batch per optimizer step arrives at."""
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


def compare(ours: Any, theirs: Any, data: Any, steps: int, batch: int, recipe_batch: int) -> None:
    """The same batches give the same weights, to rounding; with other batches the loss has to be about as low."""
    import torch

    loss, recipe_loss = ((model(data.tensors[0]) - data.tensors[1]).square().mean().item() for model in (ours, theirs))
    same = all(torch.allclose(a, b, atol=1e-4) for a, b in zip(ours.parameters(), theirs.parameters()))
    if not (same if batch == recipe_batch else loss < 1.3 * recipe_loss):
        shown = (steps, batch, loss, EPOCHS * SAMPLES // recipe_batch, recipe_batch, recipe_loss)
        raise Symptom("%d optimizer steps of %d samples, loss %.4g; the recipe has %d of %d, loss %.4g" % shown)


def train(
    ctx: Context, *, keeps_global: bool = False, scales_rate: bool = False, times_ranks: bool = False, **settings: Any
) -> None:
    """The recipe of one rank on two ranks, with DDP and as many epochs."""
    import torch
    from torch.nn.functional import mse_loss
    from torch.utils.data import DataLoader, DistributedSampler

    dist = ctx.init_process_group(timeout_s=20)
    learning_rate, reduction = settings.get("learning_rate", 0.01), settings.get("reduction", "mean")
    accumulation = settings.get("accumulation", 1)
    build = partial(getattr(torch.optim, settings.get("optimizer", "SGD")), lr=learning_rate)
    recipe_ranks, per_gpu_batch, recipe_batch = 1, BATCH, BATCH * accumulation
    data, model, trained = recipe(build, recipe_batch, reduction)
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
    compare(ddp.module.cpu(), trained, data, steps, per_gpu_batch * accumulation * world_size, recipe_batch)


def count_steps(ctx: Context, *, fewer_steps: bool = True, shorter_warmup: bool = True) -> None:
    """Steps and warm-up that were counted on one rank."""
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
        samples += BATCH  # of this rank
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
    """The Trainer of transformers on two ranks, samples in order, plain SGD."""
    rank, size = str(ctx.rank), str(ctx.world_size)
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    ctx.init_process_group(timeout_s=30)
    import torch
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Ordered(Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return torch.nn.functional.mse_loss(model(inputs["features"]), inputs["labels"])

    options = {"optim": "sgd", "learning_rate": 0.01, "lr_scheduler_type": "constant", "max_grad_norm": 0.0}
    options.update(report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False)
    options.update(num_train_epochs=EPOCHS, per_device_train_batch_size=per_device, output_dir=ctx.path("out"))
    data, net, trained = recipe(partial(torch.optim.SGD, lr=0.01), BATCH)
    trainer = Ordered(net, TrainingArguments(**options), train_dataset=[{"features": x, "labels": y} for x, y in data])
    ctx.reached()
    trainer.train()
    compare(net, trained, data, trainer.state.global_step, per_device * ctx.world_size, BATCH)


def rate_of(kind: str, values: Any) -> Optional[float]:
    """The learning rate as a number; None where the file leaves it to something else."""
    for key in ("optimizer", "params", "lr") if kind == "deepspeed" else ("learning_rate",):
        values = values.get(key) if isinstance(values, dict) else None
    try:
        return float(values)
    except (TypeError, ValueError, OverflowError):
        return None


def global_batch_of(path: Any, processes: Optional[int]) -> Tuple[int, str, Optional[float]]:
    """Samples of an optimizer step, how they come about, and the rate. Raises `UnreadableConfig`."""
    kind, values = read_config(path)
    odd = [key for key in values if re.match(UNJUDGED, key) and str(values[key]) not in ("None", "False", "1")]
    if odd:
        raise UnreadableConfig("%s sets %s, which is not judged here" % (path, " and ".join(sorted(odd))))
    total = values.get("train_batch_size")
    if kind == "deepspeed" and type(total) is int and 0 < total < 1 << 31:
        return total, "%s: train_batch_size is %d for all ranks" % (path, total), rate_of(kind, values)
    numbers: List[Any] = [next((values[key] for key in BATCHES if key in values), None)]
    numbers += [values.get("gradient_accumulation_steps"), processes]
    if not all(type(number) is int and 0 < number < 1 << 31 for number in numbers):
        raise UnreadableConfig("%s: batch per device, gradient_accumulation_steps and processes are needed" % path)
    line = "%s: batch %d x accumulation %d x %d ranks" % (path, *numbers)
    return numbers[0] * numbers[1] * numbers[2], line, rate_of(kind, values)


def check(params: Mapping[str, Any]) -> Finding:
    """The global batch of the recipe against that of this job."""
    if params["config"] is None:
        return unknown("no configuration was given", advice=ADVICE)
    try:
        now, line, rate = global_batch_of(params["config"], params["processes"])
        recipe_file = params["recipe"] or params["config"]
        before, recipe_line, recipe_rate = global_batch_of(recipe_file, params["recipe_processes"])
    except UnreadableConfig as error:
        return unknown(str(error), advice=ADVICE)
    lines = ("this job, %d samples a step, %s" % (now, line), "the recipe, %d, %s" % (before, recipe_line))
    if now == before:
        return clear(*lines)
    if rate is None or rate != recipe_rate:
        return unknown(*lines, "learning rates: %s and %s; whether that fits is not known" % (rate, recipe_rate))
    return exposed(*lines, advice="an epoch has %.3g times the optimizer steps" % (before / now))


def pair(
    name: str,
    job: Any,
    keyword: str,
    fails: str = HALF,
    because: str = KEPT,
    fix: str = SPLIT,
    values: Any = (False, True),
) -> Experiment:
    """Two ranks, and one keyword that differs: as it was, and as it is fixed."""
    library = {"transformers": ">=4.46"} if job is fit else {}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: values[0]}), symptom(fails), because, "cpu"),
        treatment=Arm(partial(job, **{keyword: values[1]}), completed(), fix, "cpu"),
        needs=Needs(packages={"torch": ">=2.1", **library}),
        deadline_s=60 if library else 30,
        expected_s=(5.0, 5.0) if library else (1.0, 1.0),
    )


GLOO = pair("gloo", train, "keeps_global")
SUMMED = r"64 optimizer steps of 4 samples, loss [2-9]\S+ the recipe has 64 of 4, loss 1\."
SUM = partial(train, reduction="sum", keeps_global=True, learning_rate=0.01 / BATCH)
FAR = partial(train, learning_rate=0.45)
STEPS, DIVIDED = "as many steps as on one rank", "divided by the growth of the global batch"
probe = Probe(
    check=check,
    params={
        "config": Param("path", "the configuration of this job"),
        "processes": Param("int", "data-parallel ranks of this job"),
        "recipe": Param("path", "the configuration that the learning rate was chosen for, if it is another file"),
        "recipe_processes": Param("int", "data-parallel ranks of that one"),
    },
    experiments=(GLOO.on_gpus(), GLOO),
    variants=(
        pair("accumulation", partial(train, accumulation=2), "keeps_global", r"16 optimizer steps of 16 .+ 32 of 8,"),
        pair("adamw", partial(train, optimizer="AdamW", learning_rate=0.03), "keeps_global"),
        pair("summed", SUM, "times_ranks", SUMMED, "DDP averages the sums", "the loss is multiplied by the ranks"),
        pair("rate", train, "scales_rate", fix="the rate is multiplied by the ranks"),
        pair("too-far", FAR, "scales_rate", HALF, "twice a rate near its limit", "the old rate", (True, False)),
        pair("max-steps", count_steps, "fewer_steps", r"read the data 8\.0 times; 4 epochs were meant", STEPS, DIVIDED),
        pair("warm-up", count_steps, "shorter_warmup", r"warm-up of 40 of 32 optimizer steps", STEPS, DIVIDED),
        pair("trainer", fit, "per_device", values=(BATCH, BATCH // 2)),
    ),
)
