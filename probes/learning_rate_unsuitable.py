"""A small classifier learns with one learning rate, and hardly at all with a larger or a smaller one."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

from kb.probe import Arm, Context, Experiment, Probe, Symptom, completed, symptom

SAMPLES, INPUTS, CLASSES, WIDTH, BATCH, STEPS = 256, 16, 4, 64, 32, 100
LARGE, GOOD, SMALL = 1.0, 1e-2, 1e-4
LEARNED = 0.3  # the loss is 1.4 before training, ln(4)


def classifier() -> Any:
    """Every call returns the same weights."""
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(INPUTS, WIDTH),
        torch.nn.ReLU(),
        torch.nn.LayerNorm(WIDTH),
        torch.nn.Linear(WIDTH, WIDTH),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, CLASSES),
    )


def samples(task: int = 0) -> Tuple[Any, Any]:
    """Random vectors, whose label is the largest of four linear functions; `task` chooses the functions."""
    import torch

    inputs = torch.randn(SAMPLES, INPUTS, generator=torch.Generator().manual_seed(task))
    weight = torch.randn(INPUTS, CLASSES, generator=torch.Generator().manual_seed(9 + task))
    return inputs, (inputs @ weight).argmax(1)


def short_run(
    rate: float,
    *,
    model: Optional[Any] = None,
    task: int = 0,
    steps: int = STEPS,
    clip: Optional[float] = None,
    outlier: Optional[int] = None,
) -> float:
    """Trains with AdamW and returns the loss over all samples. At step `outlier`, the loss counts 10,000 times."""
    import torch

    model = model or classifier()
    inputs, labels = samples(task)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate)
    batches = torch.Generator().manual_seed(1)
    for step in range(steps):
        chosen = torch.randint(0, SAMPLES, (BATCH,), generator=batches)
        loss = torch.nn.functional.cross_entropy(model(inputs[chosen]), labels[chosen])
        optimizer.zero_grad()
        (loss * 10_000 if step == outlier else loss).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(trained, clip)
        optimizer.step()
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(model(inputs), labels))


def judge(ctx: Context, loss: float, what: str) -> None:
    ctx.note(loss=round(loss, 3))
    if not loss < LEARNED:
        raise Symptom(f"the loss is {loss:.2f} after training {what}")


def train(ctx: Context, *, rate: float, sweeps: bool, clip: Optional[float] = None) -> None:
    """Trains with this rate, or with the best of five around it (`sweeps`)."""
    ctx.reached()
    if sweeps:
        rates = (rate / 100, rate / 10, rate, rate * 10, rate * 100)
        before, losses = short_run(0), {each: short_run(each) for each in rates}
        best = min((each for each in rates if losses[each] < 0.9 * before), key=losses.__getitem__, default=rate)
        if not losses[rate] < 1.1 * losses[best]:
            print(f"short runs: rate {best:g} ends at loss {losses[best]:.2f}, rate {rate:g} at {losses[rate]:.2f}")  # noqa: T201
        rate = best
    judge(ctx, short_run(rate, clip=clip), f"with the rate {rate:g}")


def train_lora(ctx: Context, *, raised: bool) -> None:
    """Fine-tunes a trained model with LoRA, with the rate that suits full fine-tuning or with ten times that rate."""
    base = classifier()
    short_run(GOOD, model=base)
    rate = 2e-3
    full = short_run(rate, model=copy.deepcopy(base), task=3, steps=2 * STEPS)
    ctx.note(full_fine_tuning=round(full, 3))
    assert full < LEARNED
    ctx.reached()
    adapted = with_lora(base)
    judge(ctx, short_run(10 * rate if raised else rate, model=adapted, task=3, steps=2 * STEPS), "an adapter")


def with_lora(model: Any, rank: int = 2) -> Any:
    """Freezes a model and adds an adapter to each linear layer; its second factor starts at zero."""
    import torch

    class Adapted(torch.nn.Module):  # type: ignore[misc]
        def __init__(self, base: Any) -> None:
            super().__init__()
            self.base, self.down = base, torch.nn.Linear(base.in_features, rank, bias=False)
            self.up = torch.nn.Linear(rank, base.out_features, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, inputs: Any) -> Any:
            return self.base(inputs) + self.up(self.down(inputs))

    torch.manual_seed(5)
    model = copy.deepcopy(model).requires_grad_(False)
    return torch.nn.Sequential(*[Adapted(each) if isinstance(each, torch.nn.Linear) else each for each in model])


def train_resumed(ctx: Context, *, scaled: bool) -> None:
    """Goes back to a checkpoint of the warm-up, with a hundredth of the rate."""
    import torch

    factor = GOOD / LARGE
    inputs, labels = samples()

    def create(rate: float) -> Tuple[Any, Any, Any]:
        model = classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))

    def continue_with(model: Any, optimizer: Any, scheduler: Any, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            scheduler.step()

    first = create(LARGE)
    continue_with(*first, steps=2)
    checkpoint = [copy.deepcopy(each.state_dict()) for each in first]
    ctx.reached()
    model, optimizer, scheduler = create(LARGE * factor)
    for each, state in zip((model, optimizer, scheduler), checkpoint):
        each.load_state_dict(state)
    if scaled:
        for group in optimizer.param_groups:
            group["lr"] *= factor
        scheduler.base_lrs = [each * factor for each in scheduler.base_lrs]
    continue_with(model, optimizer, scheduler, steps=STEPS)
    ctx.note(rate=optimizer.param_groups[0]["lr"])
    with torch.no_grad():
        loss = float(torch.nn.functional.cross_entropy(model(inputs), labels))
    judge(ctx, loss, "from the checkpoint")


def train_with_outlier(ctx: Context, *, clipped: bool) -> None:
    """One batch has a huge gradient, after which AdamW takes tiny steps for long. `clipped` limits the gradient."""
    ctx.reached()
    loss = short_run(1e-3, steps=2 * STEPS, outlier=30, clip=1.0 if clipped else None)
    judge(ctx, loss, "through one batch with a huge gradient")


NOT_LEARNED = symptom(r"the loss is \d+\.\d\d after training")
SWEEP = "five short runs find a rate with which it learns"


def experiment(name: str, control: Callable[..., None], treatment: Callable[..., None], *because: str) -> Experiment:
    like: Dict[str, Any] = {"fidelity": "cpu"}
    return Experiment(
        name=name,
        control=Arm(control, expect=NOT_LEARNED, because=because[0], **like),
        treatment=Arm(treatment, expect=completed(), because=because[1], **like),
        world_size=1,
        expected_s=(1, 2),
    )


def against(name: str, rate: float, because: str, **control: Any) -> Experiment:
    """A rate that does not suit, against the best of five around it."""
    return experiment(
        name, partial(train, rate=rate, sweeps=False, **control), partial(train, rate=rate, sweeps=True), because, SWEEP
    )


probe = Probe(
    experiments=(against("large", LARGE, "the rate is 1, so each step overshoots"),),
    variants=(
        against("small", SMALL, "the rate is 0.0001, so the weights hardly move in 100 steps"),
        against("clip", LARGE, "clipping does not help: AdamW divides by the size of the gradient anyway", clip=1.0),
        experiment(
            "lora",
            partial(train_lora, raised=False),
            partial(train_lora, raised=True),
            "the adapter is trained with the rate that suits all weights",
            "the adapter is trained with ten times that rate",
        ),
        experiment(
            "resume",
            partial(train_resumed, scaled=False),
            partial(train_resumed, scaled=True),
            "load_state_dict brings the old rate back, though the new optimizer was created with a hundredth of it",
            "the rates of optimizer and scheduler are lowered after loading",
        ),
        experiment(
            "outlier",
            partial(train_with_outlier, clipped=False),
            partial(train_with_outlier, clipped=True),
            "one batch has a gradient 10,000 times as large, and AdamW remembers it",
            "the gradient is clipped to 1",
        ),
    ),
)
