"""Gradient accumulation enters no_sync under ZeRO-2 or ZeRO-3, which DeepSpeed refuses since 0.16."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple

from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

STEPS = 2  # micro-batches of a rank


def batch(rank: int, step: int) -> Any:
    """Returns a batch of two numbers, whose means over two ranks and two steps are 2.5 and 1."""
    import torch

    return torch.tensor([[1.0 + 2 * rank + step, 1.0]])


def partition(ctx: Context, *, reduced_each_time: bool) -> None:
    """Does what ZeRO-2 does: each rank keeps its half of every gradient, which should be the mean of all ranks."""
    dist = ctx.init_process_group(timeout_s=20)
    ctx.reached()
    kept = 0.0
    for step in range(STEPS):
        gradient = batch(ctx.rank, step)[0]  # the gradient of the sum of w * x
        if reduced_each_time or step == STEPS - 1:
            dist.all_reduce(gradient)
            gradient /= ctx.world_size
        kept += gradient[ctx.rank].item() / STEPS
    if ctx.rank == 0 and kept != 2.5:
        raise Symptom("gradient %.1f instead of 2.5: one micro-batch of the other rank is lost" % kept)
    assert kept == (2.5 if ctx.rank == 0 else 1.0), kept
    ctx.meet("done")


def settings(stage: int) -> Dict[str, Any]:
    """Returns DeepSpeed's configuration."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def build_model(ctx: Context) -> Tuple[Any, Any]:
    import torch

    ctx.init_process_group(timeout_s=20)
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def compare(ctx: Context, weight: Any) -> None:
    """Raises `Symptom` unless the weight moved by the mean gradient of all ranks and micro-batches."""
    moved = [round(1.0 - value, 4) for value in weight.flatten().tolist()]
    if moved != [0.5 + ctx.world_size, 1.0]:
        raise Symptom("the step is %s instead of %s" % (moved, [0.5 + ctx.world_size, 1.0]))


def train(ctx: Context, *, reduced_each_time: bool) -> None:
    """Runs a custom training loop around DeepSpeed's engine."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    model, optimizer = build_model(ctx)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage=2))[0]
    ctx.reached()
    for step in range(STEPS):
        skip = not reduced_each_time and step < STEPS - 1
        with engine.no_sync() if skip else contextlib.nullcontext():
            engine.backward(engine(batch(ctx.rank, step)).sum())
        engine.step()
    compare(ctx, engine.module.weight)


def older_backward(wrapper: Any, loss: Any, sync_gradients: bool = True, **kwargs: Any) -> None:
    """Does what accelerate below 1.8.0 does."""
    wrapper.engine.backward(loss, **kwargs)
    wrapper.engine.step()


@contextlib.contextmanager
def older_no_sync(accelerator: Any, model: Any) -> Iterator[None]:
    """Does what accelerate up to 1.8.1 does."""
    context: Any = contextlib.nullcontext
    if accelerator.use_distributed:
        context = getattr(model, "no_sync", context)
    with context():
        yield


def accumulate(ctx: Context, *, older: str = "", sync_each_batch: bool = False, stage: int = 2) -> None:
    """Accumulates with the installed accelerate, or with the methods of an `older` one: `1.8` or `1.7`."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # type: ignore[import-not-found]
    from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-not-found]
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper  # type: ignore[import-not-found]

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    model, optimizer = build_model(ctx)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage)),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch=sync_each_batch),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if older:
        Accelerator.no_sync = older_no_sync
    if older == "1.7":
        DeepSpeedEngineWrapper.backward = older_backward
    ctx.reached()
    for step in range(STEPS):
        with accelerator.accumulate(model):
            loss = model(batch(ctx.rank, step)).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    compare(ctx, model.module.weight)
    ctx.meet("done")


def check(params: Mapping[str, Any]) -> Finding:
    """Do the releases in this interpreter enter no_sync under DeepSpeed?"""
    found = {package: release(package) for package in ("deepspeed", "accelerate", "transformers")}
    evidence = ["%s %s" % (name, ".".join(map(str, numbers)) or "not installed") for name, numbers in found.items()]
    if not found["deepspeed"]:
        return unknown(*evidence)
    if found["deepspeed"] < (0, 16):
        return clear(*evidence, "the engine of this DeepSpeed has no method no_sync")
    if not found["accelerate"]:
        return unknown(*evidence, "kb cannot tell whether a custom training loop calls engine.no_sync()")
    if found["accelerate"] >= (1, 9):
        if found["deepspeed"] < (0, 18, 3):
            evidence.append(
                "in stage 0 or 1 accelerate enters no_sync, in which this DeepSpeed does not divide the loss"
            )
        return unknown(
            *evidence,
            "accelerate does not enter no_sync for ZeRO-2 and ZeRO-3, but a custom training loop may call the engine's",
        )
    stages = "ZeRO-2 and ZeRO-3" if found["accelerate"] >= (1, 8) else "every stage"
    message = "accelerator.accumulate() with two or more processes enters no_sync, which fails for " + stages
    if found["transformers"] and found["transformers"] < (4, 47, 1):
        message += ", and so does the Trainer"
    advice = "install accelerate 1.9.0 or newer; for the Trainer alone transformers 4.47.1 is enough"
    if found["transformers"] and found["transformers"] < (4, 40):
        advice = "upgrade transformers and accelerate together, or install DeepSpeed 0.15.4"
    return exposed(*evidence, message, advice=advice)


REFUSED = raised(r"AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO")
# 0.17.6 to 0.18.2 lose every micro-batch of ZeRO-2 except the last: https://github.com/deepspeedai/DeepSpeed/issues/7718
DS = {"torch": ">=2.2", "deepspeed": ">=0.16,!=0.17.6,!=0.18.0,!=0.18.1,!=0.18.2"}
INSIDE = raised(r"AssertionError: It is illegal to call Engine\.step\(\) inside no_sync context manager")
OLDER = "an older accelerate; its no_sync and, below 1.8.0, its backward replace the installed ones"


def pair(
    name: str,
    fails: Callable[[Context], None],
    works: Callable[[Context], None],
    because: str,
    fix: str,
    expect: Expect = REFUSED,
    packages: Mapping[str, str] = DS,
    stands_for: str = "",
    ranks: int = 2,
) -> Experiment:
    fidelity = "stand-in" if stands_for else "cpu"
    return Experiment(
        name=name,
        control=Arm(fails, expect, because, fidelity, stands_for),
        treatment=Arm(works, completed(), fix, fidelity, stands_for),
        world_size=ranks,
        needs=Needs(packages=packages),
        deadline_s=60,
        expected_s=(5.0, 5.0) if packages is not TORCH else (0.5, 0.5),
    )


TORCH = {"torch": ">=2.1"}
ACCELERATE = {**DS, "accelerate": ">=1.9"}
UNDIVIDED = symptom(r"the step is \[3\.5, 1\.5\] instead of \[2\.5, 1\.0\]")
LOST = symptom(r"gradient 2\.0 instead of 2\.5: one micro-batch of the other rank is lost")
BY_HAND = "ZeRO-2 without its assertion; each rank keeps its half of a gradient of two numbers"
ENTERS = "accumulate() of accelerate up to 1.8.1 enters the engine's no_sync, which ZeRO-2 refuses"
alone, together = (partial(train, reduced_each_time=value) for value in (False, True))
first_lost, all_reduced = (partial(partition, reduced_each_time=value) for value in (False, True))
below_1_8 = partial(accumulate, older="1.7")
below_1_9 = partial(accumulate, older="1.8")
library = partial(pair, packages=ACCELERATE, stands_for=OLDER)
divided = partial(library, packages={**ACCELERATE, "deepspeed": ">=0.18.3"})

probe = Probe(
    check=check,
    experiments=(
        pair(
            "engine",
            alone,
            together,
            "the loop enters engine.no_sync() for every micro-batch but the last, which ZeRO-2 refuses",
            "the loop enters no context, because DeepSpeed counts the micro-batches itself",
            ranks=1,
        ),
        pair(
            "partition",
            first_lost,
            all_reduced,
            "the ranks do not reduce the gradient of the first micro-batch, so each loses the other's share",
            "the ranks reduce the gradient of every micro-batch",
            LOST,
            TORCH,
            BY_HAND,
        ),
    ),
    variants=(
        library(
            "accelerate",
            below_1_8,
            accumulate,
            ENTERS,
            "accumulate() of the installed accelerate does not enter no_sync for ZeRO-2",
        ),
        library(
            "sync-each-batch",
            below_1_8,
            partial(below_1_8, sync_each_batch=True),
            ENTERS,
            "sync_each_batch=True keeps accumulate() from entering no_sync",
        ),
        divided(
            "stage-1",
            below_1_9,
            partial(below_1_9, stage=1),
            "accumulate() enters no_sync in stage 2, which partitions gradients and refuses it",
            "accumulate() enters no_sync in stage 1, which does not partition gradients",
        ),
        pair(
            "stage-1-loss",
            partial(accumulate, stage=1),
            partial(accumulate, stage=1, sync_each_batch=True),
            "DeepSpeed does not divide the loss by the number of micro-batches inside no_sync",
            "sync_each_batch=True keeps every micro-batch outside no_sync",
            UNDIVIDED,
            {**ACCELERATE, "deepspeed": ">=0.16,<0.18.3"},
        ),
        divided(
            "stage-1-older",
            partial(below_1_8, stage=1),
            partial(below_1_9, stage=1),
            "backward() of accelerate below 1.8.0 steps inside no_sync, which stage 1 allows",
            "backward() of accelerate 1.8.0 and newer steps only at the last micro-batch",
            INSIDE,
        ),
    ),
)
