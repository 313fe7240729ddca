"""Gradient accumulation asks ZeRO-2 or ZeRO-3 not to reduce, and DeepSpeed refuses since 0.16."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
from functools import partial
from typing import Any, Callable, Dict, Iterator, Mapping, Tuple

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
    """Over two ranks and two steps its mean is 2.5 and 1."""
    import torch

    return torch.tensor([[1.0 + 2 * rank + step, 1.0]])


def partition(ctx: Context, *, reduced_each_time: bool) -> None:
    """ZeRO-2 by hand: each rank keeps its half of every gradient, which is to be the mean of all ranks."""
    dist = ctx.init_process_group(timeout_s=20)
    ctx.reached()
    kept = 0.0
    for step in range(STEPS):
        gradient = batch(ctx.rank, step)[0]  # of the sum of w * x
        if reduced_each_time or step == STEPS - 1:
            dist.all_reduce(gradient)
            gradient /= ctx.world_size
        kept += gradient[ctx.rank].item() / STEPS
    if ctx.rank == 0 and kept != 2.5:
        raise Symptom("gradient %.1f instead of 2.5: one micro-batch of the other rank is lost" % kept)
    assert kept == (2.5 if ctx.rank == 0 else 1.0), kept
    ctx.meet("done")


def settings(stage: int) -> Dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": STEPS,
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
    }


def model_and_optimizer(ctx: Context) -> Tuple[Any, Any]:
    import torch

    os.environ.update(RANK=str(ctx.rank), LOCAL_RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size))
    ctx.init_process_group(timeout_s=20)
    model = torch.nn.Linear(2, 1, bias=False)
    model.weight.data.fill_(1.0)
    return model, torch.optim.SGD(model.parameters(), lr=1.0)


def compare(ctx: Context, weight: Any) -> None:
    """One step with the mean over all ranks and micro-batches."""
    assert [round(value, 4) for value in weight.flatten().tolist()] == [0.5 - ctx.world_size, 0.0], weight


def train(ctx: Context, *, reduced_each_time: bool) -> None:
    """A loop of one's own around DeepSpeed's engine."""
    from kb.cpu_arms import import_deepspeed

    deepspeed = import_deepspeed()
    model, optimizer = model_and_optimizer(ctx)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings(stage=2))[0]
    ctx.reached()
    for step in range(STEPS):
        skip = not reduced_each_time and step < STEPS - 1
        with engine.no_sync() if skip else contextlib.nullcontext():
            engine.backward(engine(batch(ctx.rank, step)).sum())
        engine.step()
    compare(ctx, engine.module.weight)


@contextlib.contextmanager
def older_no_sync(accelerator: Any, model: Any) -> Iterator[None]:
    """As in accelerate up to 1.8.1."""
    context: Any = contextlib.nullcontext
    if accelerator.use_distributed:
        context = getattr(model, "no_sync", context)
    with context():
        yield


def accumulate(ctx: Context, *, older: bool = False, sync_each_batch: bool = False, stage: int = 2) -> None:
    """accelerate, with the installed release or with what an older one does."""
    from kb.cpu_arms import import_deepspeed

    import_deepspeed()
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs  # type: ignore[import-not-found]
    from accelerate.utils import GradientAccumulationPlugin  # type: ignore[import-not-found]

    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    model, optimizer = model_and_optimizer(ctx)
    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=settings(stage)),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=STEPS, sync_each_batch=sync_each_batch),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
    )
    model, optimizer = accelerator.prepare(model, optimizer)
    if older:
        Accelerator.no_sync = older_no_sync
    ctx.reached()
    for step in range(STEPS):
        with accelerator.accumulate(model):
            loss = model(batch(ctx.rank, step)).sum()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    compare(ctx, model.module.weight)
    ctx.meet("done")


def release(package: str) -> Tuple[int, ...]:
    try:
        return tuple(int(number) for number in re.findall(r"\d+", importlib.metadata.version(package))[:3])
    except importlib.metadata.PackageNotFoundError:
        return ()


def check(params: Mapping[str, Any]) -> Finding:
    """Do the releases in this interpreter enter no_sync under DeepSpeed?"""
    found = {package: release(package) for package in ("deepspeed", "accelerate", "transformers")}
    evidence = ["%s %s" % (name, ".".join(map(str, numbers)) or "not installed") for name, numbers in found.items()]
    if not found["deepspeed"]:
        return unknown(*evidence)
    if found["deepspeed"] < (0, 16):
        return clear(*evidence, "this DeepSpeed has no method no_sync")
    if not found["accelerate"]:
        return unknown(*evidence, "whether a loop of your own calls engine.no_sync() cannot be seen here")
    if found["accelerate"] >= (1, 9):
        return unknown(*evidence, "accelerate skips it for ZeRO-2 and ZeRO-3; a loop of your own may call the engine's")
    what = "accelerator.accumulate() enters no_sync for ZeRO-2 and ZeRO-3 with two or more processes"
    if found["transformers"] and found["transformers"] < (4, 47, 1):
        what += ", and so does the Trainer"
    return exposed(*evidence, what, advice="accelerate 1.9.0 or newer; for the Trainer alone transformers 4.47.1")


REFUSED = raised(r"AssertionError: no_sync context manager is incompatible with gradient partitioning logic of ZeRO")
DS = {"torch": ">=2.2", "deepspeed": ">=0.16"}
OLDER = "accelerate below 1.9.0: its method no_sync, in the place of the installed one"


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
NOT_REDUCED = "the gradient of the first micro-batch is not to be reduced"
probe = Probe(
    check=check,
    experiments=(
        pair(
            "engine",
            partial(train, reduced_each_time=False),
            partial(train, reduced_each_time=True),
            "engine.no_sync() around every micro-batch but the last",
            "no context; DeepSpeed counts the micro-batches",
            ranks=1,
        ),
        pair(
            "partition",
            partial(partition, reduced_each_time=False),
            partial(partition, reduced_each_time=True),
            NOT_REDUCED,
            "every gradient is reduced",
            symptom(r"gradient 2\.0 instead of 2\.5: one micro-batch of the other rank is lost"),
            TORCH,
            "ZeRO-2 without its assertion: each rank keeps its half of a gradient of two numbers",
        ),
    ),
    variants=(
        pair(
            "accelerate",
            partial(accumulate, older=True),
            partial(accumulate, older=False),
            "accumulate() of accelerate up to 1.8.1 enters the engine's no_sync",
            "the installed accelerate does not, for ZeRO-2",
            packages=ACCELERATE,
            stands_for=OLDER,
        ),
        pair(
            "sync-each-batch",
            partial(accumulate, older=True, sync_each_batch=False),
            partial(accumulate, older=True, sync_each_batch=True),
            "accumulate() of accelerate up to 1.8.1 enters the engine's no_sync",
            "sync_each_batch=True keeps accumulate() from it",
            packages=ACCELERATE,
            stands_for=OLDER,
        ),
        pair(
            "stage-1",
            partial(accumulate, older=True, stage=2),
            partial(accumulate, older=True, stage=1),
            "stage 2 partitions gradients",
            "stage 1 does not",
            packages=ACCELERATE,
            stands_for=OLDER,
        ),
    ),
)
