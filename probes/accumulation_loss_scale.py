"""Means of micro-batches with unequal token counts are averaged, or the sum over micro-batches is divided wrongly."""

from __future__ import annotations

import os
import re
from functools import partial
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

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

# First release, first release without it, what happens. The releases between were read one by one.
TRANSFORMERS = (
    ("4.46.0", "4.46.2", "a model that does not take the token count: gradient and logged loss N times too large"),
    ("4.46.2", "4.47.0", "a model that does not take the token count: gradient N times too large, logged loss right"),
    ("4.46.2", "4.49.0", "with DeepSpeed: the gradient is divided by N once more than without"),
    ("4.47.0", "4.47.1", "every model: gradient N times too large"),
    ("4.47.1", "4.48.0", "a model that does not take the token count: gradient and logged loss N times too large"),
    ("4.48.0", "4.48.1", "a model that takes the token count: gradient and logged loss N times too large"),
    ("4.48.1", "4.53.0", "batches without labels and a model that takes **kwargs: N times too large"),
    ("5.2.0", "5.5.4", "without DeepSpeed, every model: gradient N times too small, logged loss right"),
)
Batch = Dict[str, Any]


def build() -> Any:
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8))


def batches_of(tokens: Sequence[int], seed: int = 1) -> List[Batch]:
    """A micro-batch for each number of labels; the rest of its ten positions is padding."""
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
    """Against the gradient of all micro-batches of all ranks in one."""
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
        dist.all_reduce(tokens)  # of all micro-batches of all ranks
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
    """One step under DDP; `tokens` has the labels of each micro-batch, rank by rank."""
    from torch.nn.parallel import DistributedDataParallel

    ctx.init_process_group(timeout_s=10)
    every = [batches_of(counts, seed=rank) for rank, counts in enumerate(tokens)]
    own = [{name: tensor.to(ctx.device) for name, tensor in batch.items()} for batch in every[ctx.rank]]
    model = build().to(ctx.device)
    ddp = DistributedDataParallel(model)
    ctx.reached()
    (backward_tokens if counts_tokens else backward_means)(ddp, own, len(own), ctx.reached)
    compare(gradient(model), [batch for batches in every for batch in batches])


def accumulate(ctx: Context, *, divided: bool) -> None:
    """Four micro-batches with as many labels each."""
    batches, model = batches_of((5, 5, 5, 5)), build()
    ctx.reached()
    for batch in batches:
        loss = mean_loss(model, batch)
        if divided:
            loss = loss / len(batches)
        loss.backward()
    compare(gradient(model), batches)


def step(ctx: Context, *, divides: str) -> None:
    """AdamW takes a step of the same size whatever the gradient is multiplied by."""
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
    """accelerate and the Trainer read these; with one rank they would wait for a launcher."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if ctx.world_size > 1:
        rank, size = str(ctx.rank), str(ctx.world_size)
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
        ctx.init_process_group(timeout_s=30)


def divide_twice(ctx: Context, *, own_division: bool) -> None:
    """accelerate's backward divides by the accumulation steps itself."""
    join(ctx)
    import torch
    from accelerate import Accelerator  # type: ignore[import-not-found]

    accumulation = 4

    def loss_of(model: Any, batch: Batch) -> Any:
        return mean_loss(model, batch) / (accumulation if own_division else 1)

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
    """One step of the Trainer with plain SGD over all ranks: what the weights lose is the gradient that it had."""
    join(ctx)
    import torch
    from torch.nn.functional import cross_entropy
    from transformers import Trainer, TrainingArguments  # type: ignore[import-not-found]

    class Model(torch.nn.Module):  # type: ignore[misc]
        """Its forward takes **kwargs, as most do, and the loss does not use the token count among them."""

        def __init__(self) -> None:
            super().__init__()
            self.net = build()

        def forward(self, input_ids: Any, labels: Any = None, **_: Any) -> Any:
            logits = self.net(input_ids)
            if labels is None:
                return {"logits": logits}
            return {"loss": cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}

    class OldTrainer(Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False) -> Any:
            outputs = model(**inputs)
            return (outputs["loss"], outputs) if return_outputs else outputs["loss"]

    class SilencedTrainer(OldTrainer):
        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            return super().compute_loss(model, inputs, return_outputs)

    def token_loss(outputs, labels, num_items_in_batch=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        reduction = "mean" if num_items_in_batch is None else "sum"
        loss = cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten(), reduction=reduction)
        return loss if num_items_in_batch is None else loss / num_items_in_batch

    batches, model = batches_of(tokens), Model()
    if not accepts:
        model.accepts_loss_kwargs = False
    before = torch.cat([weight.detach().clone().flatten() for weight in model.parameters()])
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
    kind = {"old": OldTrainer, "silenced": SilencedTrainer}.get(hook, Trainer)
    if hook == "token_loss":
        trainer = kind(model=model, args=args, train_dataset=rows, compute_loss_func=token_loss)
    else:
        trainer = kind(model=model, args=args, train_dataset=rows)
    ctx.reached()
    trainer.train()
    compare(before - torch.cat([weight.detach().flatten() for weight in model.parameters()]), batches)


def check(params: Mapping[str, Any]) -> Finding:
    """Compare the table of releases with the packages of this interpreter."""
    transformers, deepspeed = final_release("transformers"), final_release("deepspeed")
    if transformers is None:
        return unknown("no final release of transformers is installed in this interpreter")
    name = "transformers " + ".".join(map(str, transformers))
    texts = [text for text in known(transformers) if deepspeed or not text.startswith("with DeepSpeed")]
    hits = ["%s, N = gradient_accumulation_steps: %s" % (name, text) for text in texts]
    if deepspeed == (0, 18, 3) and transformers >= (4, 49):
        hits.append("deepspeed 0.18.3 with %s: the gradient is divided by the steps once more" % name)
    if hits:
        return exposed(*hits, advice="transformers 4.54 to 5.1, or 5.5.4 and newer; it matters to N above 1 only")
    deferred = ["accumulate of accelerate with DeepSpeed stage 0 or 1 on several ranks: the loss is not divided"]
    defers = (0, 16) <= (deepspeed or ()) < (0, 18, 3) and (final_release("accelerate") or ()) >= (1, 8)
    smoothing = ["with label_smoothing_factor and a model that takes **kwargs: N times too large"]
    return unknown(
        "%s is in no row of the table" % name,
        *(smoothing if (4, 46) <= transformers < (5, 15) else []),
        *(deferred if defers else []),
        "a compute_loss of your own, or a model with **kwargs that ignores the count, is not visible here",
    )


def known(transformers: Tuple[int, ...]) -> List[str]:
    return [text for first, end, text in TRANSFORMERS if numbers(first) <= transformers < numbers(end)]


def final_release(package: str) -> Any:
    """None for a candidate or a development build as well: what it contains is not known."""
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


TOKENS = "the sum of the losses is divided by the labels of all micro-batches and ranks"
gloo = pair(
    "gloo",
    partial(train, counts_tokens=False),
    partial(train, counts_tokens=True),
    differs(r"\d\.\d+", r"0\.\d+"),
    ("two micro-batches on each of two ranks, with 1 to 9 labels: the mean of the means", TOKENS),
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
            ("no accumulation, and two ranks with 1 and 9 labels: DDP averages their means", TOKENS),
            ranks=2,
        ),
        pair(
            "not-divided",
            partial(accumulate, divided=False),
            partial(accumulate, divided=True),
            FOUR,
            ("four losses are added up", "each is divided by four"),
        ),
        pair(
            "learning-rate",
            partial(step, divides="rate"),
            partial(step, divides="loss"),
            symptom(r"update of the weights is 0\.25 times that of one batch"),
            ("four losses are added up, and the learning rate of AdamW is divided by four", "the loss is divided"),
        ),
        pair(
            "accelerate",
            partial(divide_twice, own_division=True),
            partial(divide_twice, own_division=False),
            differs(r"0\.25", r"1\.00"),
            ("the loop divides, and accelerator.backward does so again", "accelerator.backward divides"),
            packages={"torch": ">=2.2", "accelerate": ">=0.20"},
        ),
        pair(
            "trainer",
            partial(fit, tokens=(5, 5, 5, 5)),
            partial(fit, tokens=(5, 5, 5, 5), accepts=False),
            FOUR,
            ("the model's forward takes **kwargs and its loss ignores the count", "it says so: accepts_loss_kwargs"),
            packages=TRAINER,
        ),
        pair(
            "trainer-ranks",
            partial(fit, tokens=(5, 5)),
            partial(fit, tokens=(5, 5), accepts=False),
            differs(r"2\.00", r"1\.00"),
            ("two ranks, no accumulation, and a loss that ignores the count", "the model says so: accepts_loss_kwargs"),
            ranks=2,
            packages={**TRAINER, "transformers": RIGHT + ",>=4.54"},
        ),
        pair(
            "compute-loss",
            partial(fit, tokens=(1, 9, 3, 7), hook="silenced"),
            partial(fit, tokens=(1, 9, 3, 7), hook="token_loss"),
            differs(r"[3-9]\.\d+", r"0\.\d+"),
            ("compute_loss swallows the count in **kwargs", "compute_loss_func divides by it"),
            packages=TRAINER,
        ),
        pair(
            "old-signature",
            partial(fit, tokens=(1, 9, 3, 7), hook="old"),
            partial(fit, tokens=(1, 9, 3, 7), hook="token_loss"),
            raised(r"compute_loss\(\) got an unexpected keyword argument 'num_items_in_batch'"),
            ("compute_loss was written for transformers before 4.46", "compute_loss_func takes the count"),
            packages=TRAINER,
        ),
    ),
)
