"""The loop averages means of micro-batches with unequal token counts, or divides the loss by N never or twice."""

from __future__ import annotations

import os
import re
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from kb.cpu_arms import without_launcher
from kb.packages import numbers, version
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

# First release, first release without the fault, what happens. Somebody read each release in between.
TRANSFORMERS = (
    ("4.46.0", "4.46.2", "a model that does not accept the token count: gradient and logged loss N times too large"),
    ("4.46.2", "4.47.0", "a model that does not accept the token count: gradient N times too large, logged loss right"),
    ("4.46.2", "4.49.0", "with DeepSpeed: the gradient is divided by N one time too many"),
    ("4.47.0", "4.47.1", "every model: gradient N times too large"),
    ("4.47.1", "4.48.0", "a model that does not accept the token count: gradient and logged loss N times too large"),
    ("4.48.0", "4.48.1", "a model that accepts the token count: gradient and logged loss N times too large"),
    ("4.48.1", "4.53.0", "batches without labels and a model that accepts **kwargs: gradient N times too large"),
    ("5.2.0", "5.5.4", "without DeepSpeed, every model: gradient N times too small, logged loss right"),
)
Batch = Dict[str, Any]


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def batches_of(tokens: Sequence[int], seed: int = 1) -> List[Batch]:
    """One micro-batch for each number of labels; its other positions, of ten, are padding."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    batches = []
    for count in tokens:
        ids, labels = torch.randint(0, 8, (2, 1, 10), generator=generator)
        labels[:, count:] = -100
        batches.append({"input_ids": ids, "labels": labels})
    return batches


def mean_loss(model: Any, batch: Batch) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())


def gradient(model: Any) -> Any:
    import torch

    return torch.cat([weight.grad.detach().flatten().cpu() for weight in model.parameters()])


def compare(got: Any, batches: Sequence[Batch]) -> None:
    """Raises `Symptom` if `got` is not the gradient of one batch with all micro-batches of all ranks."""
    import torch

    model = build()
    mean_loss(model, {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}).backward()
    whole = gradient(model)
    times, cosine = (got.norm() / whole.norm()).item(), torch.nn.functional.cosine_similarity(got, whole, dim=0).item()
    if abs(times - 1) > 1e-3 or cosine < 0.999:
        numbers = (got.norm().item(), whole.norm().item(), times, cosine)
        raise Symptom("gradient norm %.4f accumulated, %.4f in one batch: %.2f times, cosine %.2f" % numbers)


def backward_tokens(ddp: Any, loader: Sequence[Batch], accumulation: int, step: Callable[[], None]) -> None:
    import contextlib
    import itertools

    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy

    stream = iter(loader)
    while batches := list(itertools.islice(stream, accumulation)):  # a shorter last window is a step as well
        tokens = torch.stack([(batch["labels"] != -100).sum() for batch in batches]).sum()
        dist.all_reduce(tokens)  # of all micro-batches of all ranks; with nccl, the batches must be on the GPU here
        for number, batch in enumerate(batches, 1):
            with contextlib.nullcontext() if number == len(batches) else ddp.no_sync():
                logits = ddp(batch["input_ids"])
                loss = cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
                (loss * dist.get_world_size() / tokens).backward()  # DDP divides by the number of ranks
        step()


def backward_means(ddp: Any, batches: Sequence[Batch], _: int, step: Callable[[], None]) -> None:
    import contextlib

    for number, batch in enumerate(batches, 1):
        with contextlib.nullcontext() if number == len(batches) else ddp.no_sync():
            (mean_loss(ddp, batch) / len(batches)).backward()
    step()


def train(ctx: Context, *, counts_tokens: bool, tokens: Sequence[Sequence[int]] = ((1, 9), (4, 2))) -> None:
    """One step under DDP; `tokens` has the number of labels in each micro-batch, rank by rank."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    all_batches = [batches_of(counts, seed=rank) for rank, counts in enumerate(tokens)]
    batches = [{name: tensor.to(ctx.device) for name, tensor in batch.items()} for batch in all_batches[ctx.rank]]
    model = build().to(ctx.device)
    ddp = DistributedDataParallel(model)
    ctx.reached()
    (backward_tokens if counts_tokens else backward_means)(ddp, batches, len(batches), ctx.reached)
    compare(gradient(model), [batch for of_rank in all_batches for batch in of_rank])


def accumulate(ctx: Context, *, divided: bool) -> None:
    """Accumulates four micro-batches with equal numbers of labels."""
    batches, model = batches_of((5, 5, 5, 5)), build()
    ctx.reached()
    for batch in batches:
        loss = mean_loss(model, batch)
        if divided:
            loss = loss / len(batches)
        loss.backward()
    compare(gradient(model), batches)


def step(ctx: Context, *, divides: str) -> None:
    """Compares one step of AdamW over four micro-batches with one step over one batch.

    A constant factor in the gradient does not change the size of the step.
    """
    import torch

    batches, updates = batches_of((5, 5, 5, 5)), []
    ctx.reached()
    for steps, rate in ((4, 0.01 if divides == "loss" else 0.01 / 4), (1, 0.01)):
        model = build()
        before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
        if steps == 1:
            batches = [{name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}]
        for batch in batches:
            loss = mean_loss(model, batch)
            if divides == "loss":
                loss = loss / len(batches)
            loss.backward()
        optimizer.step()
        updates.append(torch.cat([weight.detach().flatten() for weight in model.parameters()]) - before)
    times = (updates[0].norm() / updates[1].norm()).item()
    if abs(times - 1) > 1e-2:
        raise Symptom("update of the weights is %.2f times that of one batch" % times)


def join(ctx: Context) -> None:
    """Sets the variables that accelerate and the Trainer read; with one rank they would wait for other processes."""
    without_launcher()
    if ctx.world_size > 1:
        rank, size = str(ctx.rank), str(ctx.world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        ctx.init_process_group(timeout_s=30)


def step_with_accelerate(ctx: Context, *, divides_in_loop: bool) -> None:
    """One step with accelerate, whose backward divides by the number of accumulation steps."""
    join(ctx)
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accumulation = 4

    def loss_of(model: Any, batch: Batch) -> Any:
        return mean_loss(model, batch) / (accumulation if divides_in_loop else 1)

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulation)
    loader, model = batches_of((5, 5, 5, 5)), build()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
    ctx.reached()
    assert accelerator.gradient_accumulation_steps == accumulation
    for batch in loader:
        with accelerator.accumulate(model):
            loss = loss_of(model, batch)  # a mean
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    compare(before - torch.cat([weight.detach().flatten() for weight in model.parameters()]), loader)


def fit(ctx: Context, *, tokens: Sequence[int], accepts: bool = True, hook: str = "") -> None:
    """One step of the Trainer with plain SGD over all ranks: the change of the weights is the gradient that it used."""
    join(ctx)
    import torch

    batches, model = batches_of(tokens), build_model_with_kwargs()
    if not accepts:
        model.accepts_loss_kwargs = False
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
    trainer = build_trainer(ctx, model, batches, hook)
    ctx.reached()
    trainer.train()
    compare(before - torch.cat([weight.detach().flatten() for weight in model.parameters()]), batches)


def build_model_with_kwargs() -> Any:
    import torch
    from torch.nn.functional import cross_entropy

    class Model(torch.nn.Module):  # type: ignore[misc]
        """Its forward accepts **kwargs, as most do, and its loss ignores the token count among them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
            logits = self.net(input_ids)
            if labels is None:
                return {"logits": logits}
            return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    return Model()


def trainer_class(hook: str) -> Any:
    """The Trainer whose compute_loss is `old` or `silenced`; else the Trainer itself."""
    from transformers import Trainer  # type: ignore[import-not-found]

    class OldTrainer(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    class SilencedTrainer(OldTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    return {"old": OldTrainer, "silenced": SilencedTrainer}.get(hook, Trainer)


def build_trainer(ctx: Context, model: Any, batches: Sequence[Batch], hook: str) -> Any:
    from torch.nn.functional import cross_entropy
    from transformers import TrainingArguments

    def token_loss(outputs, labels, num_items_in_batch=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    args = TrainingArguments(
        output_dir=ctx.path("out"),
        max_steps=1,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=len(batches) // ctx.world_size,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to="none",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    rows = [{name: tensor[0] for name, tensor in batch.items()} for batch in batches]
    kind = trainer_class(hook)
    if hook == "token_loss":
        trainer = kind(model=model, args=args, train_dataset=rows, compute_loss_func=token_loss)
    else:
        trainer = kind(model=model, args=args, train_dataset=rows)
    return trainer


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the table of releases with the packages of this interpreter."""
    transformers, deepspeed = final_release("transformers"), final_release("deepspeed")
    if transformers is None:
        return unknown("this interpreter has no final release of transformers")
    name = "transformers " + ".".join(map(str, transformers))
    texts = [text for text in faults_of(transformers) if deepspeed or not text.startswith("with DeepSpeed")]
    faults = ["%s, N = gradient_accumulation_steps: %s" % (name, text) for text in texts]
    if deepspeed == (0, 18, 3) and transformers >= (4, 49):
        faults.append("deepspeed 0.18.3 with %s: the gradient is divided by N one time too many" % name)
    if faults:
        advice = "install transformers 5.5.4 or newer, or 4.57 to 5.1, unless you train with N = 1"
        return exposed(*faults, advice=advice)
    undivided = ["accumulate of accelerate with DeepSpeed stage 0 or 1 on multiple ranks: nothing divides the loss"]
    is_undivided = (0, 16) <= (deepspeed or ()) < (0, 18, 3) and (final_release("accelerate") or ()) >= (1, 8)
    smoothing = ["with label_smoothing_factor and a model that accepts **kwargs: gradient N times too large"]
    return unknown(
        "no row of kb's table is about %s" % name,
        *(smoothing if (4, 46) <= transformers < (5, 15) else []),
        *(undivided if is_undivided else []),
        "kb cannot see your compute_loss, or whether a model with **kwargs ignores the count",
    )


def faults_of(transformers: Tuple[int, ...]) -> List[str]:
    return [text for first, end, text in TRANSFORMERS if numbers(first) <= transformers < numbers(end)]


def final_release(package: str) -> Any:
    """The release as a tuple; None also for a candidate or development build, whose contents kb does not know."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.post\d+|\+.*)?$", version(package), re.ASCII)
    return tuple(int(part or 0) for part in match.groups()) if match else None


def differs(times: str, cosine: str) -> Expect:
    return symptom(rf"gradient norm \S+ accumulated, \S+ in one batch: {times} times, cosine {cosine}$")


FOUR = differs(r"4\.00", r"1\.00")
RIGHT = ">=4.48.1,!=5.2.*,!=5.3.*,!=5.4.*,!=5.5.0,!=5.5.1,!=5.5.2,!=5.5.3"  # see TRANSFORMERS
TRAINER = MappingProxyType({"torch": ">=2.2", "transformers": RIGHT, "accelerate": ">=0.26"})


def pair(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    expect: Expect,
    because: Tuple[str, str],
    ranks: int = 1,
    packages: Mapping[str, str] = MappingProxyType({"torch": ">=2.2"}),
) -> Experiment:
    slow = len(packages) > 1
    return Experiment(
        name=name,
        control=Arm(broken, expect=expect, because=because[0], fidelity="cpu"),
        treatment=Arm(fixed, expect=completed(), because=because[1], fidelity="cpu"),
        world_size=ranks,
        needs=Needs(packages=packages),
        deadline_s=60 if slow else 20,
        expected_s=(5.0, 5.0) if slow else (0.4, 0.4),
    )


DIVIDES_BY_LABELS = "the sum of the losses is divided by the number of labels in all micro-batches and ranks"
ACCEPTS_NO_KWARGS = "the model sets accepts_loss_kwargs = False, so the Trainer divides the loss itself"
gloo = pair(
    "gloo",
    partial(train, counts_tokens=False),
    partial(train, counts_tokens=True),
    differs(r"\d\.\d+", r"0\.\d+"),
    ("the loop averages the means of four micro-batches that have 1 to 9 labels", DIVIDES_BY_LABELS),
    ranks=2,
)

probe = Probe(
    check=check,
    experiments=(gloo.on_gpus(), gloo),
    variants=(
        pair(
            "ranks",
            partial(train, counts_tokens=False, tokens=((1,), (9,))),
            partial(train, counts_tokens=True, tokens=((1,), (9,))),
            differs(r"\d\.\d+", r"0\.\d+"),
            ("DDP averages the means of two ranks, which have 1 and 9 labels", DIVIDES_BY_LABELS),
            ranks=2,
        ),
        pair(
            "not-divided",
            partial(accumulate, divided=False),
            partial(accumulate, divided=True),
            FOUR,
            ("the loop adds up four losses and nothing divides them", "the loop divides each loss by four"),
        ),
        pair(
            "learning-rate",
            partial(step, divides="rate"),
            partial(step, divides="loss"),
            symptom(r"update of the weights is 0\.25 times that of one batch"),
            (
                "the loop adds up four losses and divides the learning rate of AdamW by four instead",
                "the loop divides each loss by four and leaves the learning rate alone",
            ),
        ),
        pair(
            "accelerate",
            partial(step_with_accelerate, divides_in_loop=True),
            partial(step_with_accelerate, divides_in_loop=False),
            differs(r"0\.25", r"1\.00"),
            (
                "the loop divides the loss, and accelerator.backward divides it again",
                "only accelerator.backward divides the loss",
            ),
            packages={"torch": ">=2.2", "accelerate": ">=0.20"},
        ),
        pair(
            "trainer",
            partial(fit, tokens=(5, 5, 5, 5)),
            partial(fit, tokens=(5, 5, 5, 5), accepts=False),
            FOUR,
            (
                "the model's forward accepts **kwargs, but its loss ignores the token count",
                ACCEPTS_NO_KWARGS,
            ),
            packages=TRAINER,
        ),
        pair(
            "trainer-ranks",
            partial(fit, tokens=(5, 5)),
            partial(fit, tokens=(5, 5), accepts=False),
            differs(r"2\.00", r"1\.00"),
            (
                "two ranks train without accumulation, and the loss ignores the token count",
                ACCEPTS_NO_KWARGS,
            ),
            ranks=2,
            packages={**TRAINER, "transformers": RIGHT + ",>=4.54"},
        ),
        pair(
            "compute-loss",
            partial(fit, tokens=(1, 9, 3, 7), hook="silenced"),
            partial(fit, tokens=(1, 9, 3, 7), hook="token_loss"),
            differs(r"[3-9]\.\d+", r"0\.\d+"),
            (
                "compute_loss swallows the token count in **kwargs and returns a mean",
                "compute_loss_func divides the loss by the token count",
            ),
            packages=TRAINER,
        ),
        pair(
            "old-signature",
            partial(fit, tokens=(1, 9, 3, 7), hook="old"),
            partial(fit, tokens=(1, 9, 3, 7), hook="token_loss"),
            raised(r"compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'"),
            (
                "compute_loss has the signature of transformers before 4.46, without the token count",
                "compute_loss_func accepts the token count",
            ),
            packages=TRAINER,
        ),
    ),
)
