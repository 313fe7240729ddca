"""accelerate steps a schedule once per process, so a schedule that counts optimizer steps ends before the training."""

from __future__ import annotations

import os
from functools import partial
from typing import Any, Callable, Dict, List

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

STEPS = 12  # optimizer steps of the run, and the intended length of its schedule
WARMUP = 2  # optimizer steps of the warm-up
ACCUMULATION = 4
ACCELERATE = Needs(packages={"torch": ">=2.1", "accelerate": ">=0.28"})


def linear(length: int, warmup: int = 0) -> Callable[[int], float]:
    """Rises from 0 to 1, then falls to 0, like get_scheduler("linear", ...) of transformers and diffusers."""
    return lambda step: min(step / warmup if warmup else 1.0, max(0.0, (length - step) / (length - warmup)))


def cosine(length: int, warmup: int = 0) -> Callable[[int], float]:
    """Rises from 0 to 1, then falls to 0 in half a period, like theirs; beyond its length it rises again."""
    from math import cos, pi

    return lambda step: step / warmup if step < warmup else 0.5 * (1 + cos(pi * (step - warmup) / (length - warmup)))


def build_accelerator(ctx: Context, **options: Any) -> Any:
    """Creates an Accelerator that uses the process group of this arm."""
    from accelerate import Accelerator  # type: ignore[import-not-found]

    rank, world_size = str(ctx.rank), str(ctx.world_size)
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size})
    ctx.init_process_group(timeout_s=20)
    accelerator = Accelerator(cpu=True, **options)
    assert accelerator.num_processes == ctx.world_size
    return accelerator


def compare(ctx: Context, rates: List[float], planned: float) -> None:
    """Raises `Symptom` if the last rate is not the one that was planned after that many optimizer steps."""
    ctx.note(rates=[round(rate, 4) for rate in rates])
    if abs(rates[-1] - planned) > 0.01:
        counts = f"{len(rates)} of {STEPS} optimizer steps"
        raise Symptom(f"the learning rate is {rates[-1]:.2f} after {counts}; planned {planned:.2f}")


def train(
    ctx: Context,
    *,
    multiplied: bool = False,
    follows_optimizer: bool = True,
    guarded: bool = True,
    splits_batches: bool = False,
    accumulation: int = 1,
    has_loader: bool = False,
    form: Callable[[int, int], Callable[[int], float]] = linear,
    until: int = STEPS // 2,
) -> None:
    """Makes `until` optimizer steps under accelerate, with a schedule that is planned for `STEPS` of them."""
    import torch
    from accelerate import DataLoaderConfiguration

    accelerator = build_accelerator(
        ctx,
        step_scheduler_with_optimizer=follows_optimizer,
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(split_batches=splits_batches),
    )
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    batches: Any = [torch.ones(2, 2)] * (until * accumulation)
    if has_loader:
        batches = accelerator.prepare(torch.utils.data.DataLoader(torch.ones(until * 2 * ctx.world_size, 2), 2))
    scheduler = build_scheduler(optimizer, form, accelerator if multiplied else None)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    ctx.reached()
    rates: List[float] = []
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            if guarded:
                if accelerator.sync_gradients and not accelerator.optimizer_step_was_skipped:
                    scheduler.step()
            else:
                scheduler.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            rates.append(optimizer.param_groups[0]["lr"])
        if len(rates) == until:
            break
    compare(ctx, rates, form(STEPS, WARMUP)(until))


def build_scheduler(optimizer: Any, form: Callable[[int, int], Callable[[int], float]], accelerator: Any) -> Any:
    """Creates a schedule for `STEPS` optimizer steps; given an accelerator, multiplies its length by the processes."""
    import torch

    max_train_steps, warmup_steps = STEPS, WARMUP
    schedule_steps, schedule_warmup = max_train_steps, warmup_steps
    if accelerator is not None:
        schedule_steps = max_train_steps * accelerator.num_processes
        schedule_warmup = warmup_steps * accelerator.num_processes
    return torch.optim.lr_scheduler.LambdaLR(optimizer, form(schedule_steps, schedule_warmup))


def count_batches(ctx: Context, *, multiplied: bool) -> None:
    """Takes the length from the loader before `prepare`, which counts the batches of all processes already."""
    import torch

    accelerator = build_accelerator(ctx)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    loader = torch.utils.data.DataLoader(torch.ones(STEPS * ctx.world_size, 2), batch_size=1)
    length = len(loader) * ctx.world_size if multiplied else len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear(length))
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    ctx.reached()
    rates: List[float] = []
    for batch in loader:
        accelerator.backward(model(batch).mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    compare(ctx, rates, 0.0)


def step_each_epoch(ctx: Context, *, prepared: bool) -> None:
    """Divides the rate by ten after every third epoch; an epoch has one optimizer step."""
    import torch

    accelerator = build_accelerator(ctx)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=3, gamma=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    if prepared:
        scheduler = accelerator.prepare(scheduler)
    ctx.reached()
    rates: List[float] = []
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).mean())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    compare(ctx, rates, 1.0)


def resume(ctx: Context, *, has_lambda: bool) -> None:
    """Multiplies the length after half of the run, and resumes from its checkpoint."""
    import torch

    accelerator = build_accelerator(ctx)

    def build(length: int) -> Any:
        optimizer = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=1.0)
        if has_lambda:
            return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, linear(length))
        return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=length)

    def run(optimizer: Any, scheduler: Any, steps: int) -> List[float]:
        rates: List[float] = []
        for _ in range(steps):
            optimizer.step()
            scheduler.step()
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    optimizer, scheduler = accelerator.prepare(*build(STEPS))
    ctx.reached()
    half = STEPS // 2
    rates = run(optimizer, scheduler, half)
    saved = {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    optimizer, scheduler = accelerator.prepare(*build(STEPS * accelerator.num_processes))
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    if not has_lambda:
        scheduler.scheduler.total_iters = STEPS * accelerator.num_processes
    rates += run(optimizer, scheduler, 3)
    compare(ctx, rates, linear(STEPS)(half + 3))


def count_steps(ctx: Context, *, multiplied: bool) -> None:
    """Steps the schedule as AcceleratedScheduler.step does, in a loop without accelerate."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    length = STEPS * dist.get_world_size() if multiplied else STEPS
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear(length))
    ctx.reached()
    rates: List[float] = []
    for _ in range(STEPS // 2):
        model(torch.ones(1, 2)).mean().backward()
        optimizer.step()
        for _ in range(dist.get_world_size()):
            scheduler.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
    compare(ctx, rates, 0.5)


def step_each_batch(ctx: Context, *, with_optimizer: bool) -> None:
    """Accumulates gradients in a custom loop, and steps the schedule with the optimizer or at each micro-batch."""
    import torch

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, linear(STEPS))
    ctx.reached()
    rates: List[float] = []
    accumulation = ACCUMULATION
    for batch_index in range(STEPS // 2 * accumulation):
        (model(torch.ones(1, 2)).mean() / accumulation).backward()
        if with_optimizer:
            if (batch_index + 1) % accumulation == 0:
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        else:
            if (batch_index + 1) % accumulation == 0:
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
        if (batch_index + 1) % accumulation == 0:
            rates.append(optimizer.param_groups[0]["lr"])
    compare(ctx, rates, 0.5)


EARLY = r"the learning rate is 0\.00 after 6 of 12 optimizer steps; planned 0\.[56]0"


def arms(
    name: str,
    job: Callable[..., None],
    fix: Dict[str, Any],
    because: str,
    because_fixed: str,
    pattern: str = EARLY,
    **changes: Any,
) -> Experiment:
    """An experiment whose treatment gets the keyword in `fix`, and whose control gets its opposite."""
    ((keyword, value),) = fix.items()
    fidelity = {"fidelity": changes.pop("fidelity", "cpu"), "stands_for": changes.pop("stands_for", "")}
    control, treatment = partial(job, **{keyword: not value}), partial(job, **fix)
    settings = {"needs": ACCELERATE, "expected_s": (5.0, 5.0), "deadline_s": 60.0, **changes}
    return Experiment(
        name,
        Arm(control, symptom(pattern), because, **fidelity),
        Arm(treatment, completed(), because_fixed, **fidelity),
        **settings,
    )


TWICE = "there are two processes, so accelerate steps the schedule twice per optimizer step"
MULTIPLIED = "the length of the schedule is multiplied by the number of processes"
PLAIN: Dict[str, Any] = {"needs": Needs(), "expected_s": (1.5, 1.5), "deadline_s": 30.0}

probe = Probe(
    experiments=(
        arms("accelerate", train, {"multiplied": True}, TWICE, MULTIPLIED),
        arms(
            "loop",
            count_steps,
            {"multiplied": True},
            "the loop steps the schedule once per process after each optimizer step",
            MULTIPLIED,
            fidelity="stand-in",
            stands_for="AcceleratedScheduler.step; the loop of the probe makes the same steps",
            **PLAIN,
        ),
    ),
    variants=(
        arms(
            "own-count",
            train,
            {"follows_optimizer": False},
            TWICE,
            "step_scheduler_with_optimizer=False, so accelerate steps the schedule once",
        ),
        arms(
            "split",
            partial(train, has_loader=True),
            {"splits_batches": True},
            TWICE,
            "with split_batches=True, accelerate divides each batch instead of the loader, and steps the schedule once",
        ),
        arms(
            "unguarded",
            partial(train, follows_optimizer=False, accumulation=2),
            {"guarded": True},
            "step_scheduler_with_optimizer=False, and the loop steps the schedule at each of two micro-batches",
            "the loop steps the schedule only when the optimizer made a step",
        ),
        arms(
            "cosine",
            partial(train, form=cosine, until=STEPS),
            {"multiplied": True},
            "the cosine reaches 0 in the middle of the run, and rises again",
            "the cosine reaches 0 at the end of the run",
            r"the learning rate is 0\.90 after 12 of 12 optimizer steps; planned 0\.00",
        ),
        arms(
            "counted-batches",
            count_batches,
            {"multiplied": False},
            "the length comes from the loader before prepare, but is multiplied by the number of processes too",
            "the length comes from the loader before prepare, and is not multiplied",
            r"the learning rate is 0\.50 after 12 of 12 optimizer steps; planned 0\.00",
        ),
        arms(
            "per-epoch",
            step_each_epoch,
            {"prepared": False},
            "a prepared StepLR makes two steps at the end of each epoch",
            "the StepLR is not passed to prepare",
            r"the learning rate is 0\.10 after 2 of 12 optimizer steps; planned 1\.00",
        ),
        arms(
            "resume",
            resume,
            {"has_lambda": True},
            "LinearLR continues from the rate in the checkpoint, 0, although its length is set again after loading",
            "LambdaLR computes the rate from the step, and its state contains no length",
            r"the learning rate is 0\.00 after 9 of 12 optimizer steps; planned 0\.25",
        ),
        arms(
            "micro-batch",
            step_each_batch,
            {"with_optimizer": True},
            "the loop steps the schedule at every micro-batch, four times per optimizer step",
            "the loop steps the schedule after each optimizer step",
            world_size=1,
            **PLAIN,
        ),
    ),
)
