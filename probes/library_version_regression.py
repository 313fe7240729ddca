"""Known bad releases of libraries against what is installed; and one in lines of our own: TRL's gather of logits."""

from __future__ import annotations

import importlib
import re
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, List, Mapping, Optional, Tuple

from kb.packages import version as installed
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

Version = Tuple[int, ...]
SOURCE, THREAD = "read in source", "read in thread"
GITHUB = "https://github.com/"
DEEPSPEED, HF = GITHUB + "deepspeedai/DeepSpeed/", GITHUB + "huggingface/"


@dataclass(frozen=True)
class Row:
    """One known bad release range. `bad` and `along` are PEP 440; `fixed` is "" where the release is unknown."""

    package: str
    bad: str
    fixed: str
    when: str
    symptom: str
    source: str
    grade: str
    along: str = ""  # only together with this, "torch>=2.10"


ROWS = (
    Row(
        "trl", ">=0.14.0,<0.17.0", "0.17.0", "ORPO and CPO, several GPUs",
        "whole logits are gathered, of another length on each rank: hang at step 0, or wrong values",
        HF + "trl/pull/3069", SOURCE,
    ),
    Row(
        "trl", "==0.15.0", "0.15.1", "SFT, several GPUs",
        "logits and labels of unequal length are gathered: hang", HF + "trl/pull/2890", SOURCE,
    ),
    Row(
        "trl", ">=0.16.0,<0.17.0", "0.17.0", "SFT with padding_free, several GPUs",
        "a count that lies on the CPU is gathered, which NCCL does not do", HF + "trl/pull/3245", SOURCE,
    ),
    Row(
        "trl", ">=0.21.0,<0.23.0", "0.23.0", "GRPO with top_entropy_quantile below 1",
        "entropies of unequal length are gathered: hang", HF + "trl/pull/3964", SOURCE,
    ),
    Row(
        "trl", ">=0.27.0,<0.28.0", "0.28.0", "SFT, PEFT with ZeRO-3 and gradient checkpointing",
        "CheckpointError: recomputed values have different metadata, shape 0", HF + "trl/pull/6356", SOURCE,
    ),
    Row(
        "trl", ">=0.27.0,<1.9.0", "1.9.0",
        "DPO, GRPO, RLOO, Reward or KTO, PEFT with ZeRO-3 and gradient checkpointing",
        "CheckpointError: recomputed values have different metadata, shape 0", HF + "trl/pull/6356", SOURCE,
    ),
    Row(
        "trl", ">=0.27.0,<=1.16.0", "", "ORPO, CPO or online DPO, PEFT with ZeRO-3 and gradient checkpointing",
        "CheckpointError: recomputed values have different metadata, shape 0", HF + "trl/pull/6356", SOURCE,
    ),
    Row(
        "deepspeed", "==0.9.0", "0.9.1", "accelerate with ZeRO-2",
        "the world size is read as 1, so train_batch_size does not add up", DEEPSPEED + "issues/3228", THREAD,
    ),
    Row(
        "deepspeed", ">=0.9.2,<0.10.0", "0.10.0", "bf16 or fp32 with ZeRO-1 or ZeRO-2",
        "gradients are not clipped, silently", DEEPSPEED + "pull/3790", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.9.3,<0.9.5", "0.9.5", "ZeRO-3 with zero.Init",
        "clearly worse results, silently: parameters and buffers are not broadcast at the start",
        DEEPSPEED + "pull/3611", THREAD,
    ),
    Row(
        "deepspeed", ">=0.9.3,<0.9.5", "0.9.5", "ZeRO-3 with zero.Init",
        "the model is not moved to the GPU: weights and inputs on different devices, cuda and cpu",
        DEEPSPEED + "issues/3678", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.11.2,<0.12.4", "0.12.4", "pipeline parallelism with a loss in bf16 or fp16",
        "the last stage broadcasts the loss in its own dtype, the others receive float32: 0 is reported",
        DEEPSPEED + "blob/v0.12.3/deepspeed/runtime/pipe/engine.py", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.13.2,<0.16.6", "0.16.6", "ZeRO-1 or ZeRO-2 with gradient clipping",
        "an infinite gradient norm becomes NaN, and clipping fails", DEEPSPEED + "pull/7171", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.14.1,<0.14.3", "0.14.3", "ZeRO-3 with offload",
        "Expected all tensors to be on the same device, cuda and cpu", DEEPSPEED + "pull/5461", SOURCE,
    ),
    Row(
        "deepspeed", "==0.17.1", "0.17.2", "workers of a DataLoader",
        "its import sets the start method to spawn: Can't pickle local object, or a script that runs again",
        DEEPSPEED + "pull/7349", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.17.6,<0.18.3", "0.18.3", "ZeRO-2 with gradient accumulation, no CPU offload",
        "every micro-batch but the last is discarded, silently; the gradient norm is far too small",
        DEEPSPEED + "blob/v0.18.2/deepspeed/runtime/zero/stage_1_and_2.py", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.18.3,<0.19.6", "0.19.6",
        "ZeRO-2, bf16, accumulation, a submodule used through the engine and past it",
        "part of the gradient has the wrong scale, silently", DEEPSPEED + "issues/8224", THREAD,
    ),
    Row(
        "deepspeed", ">=0.18.5,<0.18.7", "0.18.7", "ZeRO-1 to ZeRO-3",
        "the backward is slower, by work in every gradient hook", DEEPSPEED + "pull/7886", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.18.3,<0.19.0", "0.19.0", "bf16, grad_accum_dtype fp32, ZeRO-1, no CPU offload",
        "the last micro-batch is not averaged over the ranks, silently", DEEPSPEED + "pull/7985", SOURCE,
    ),
    Row(
        "deepspeed", "<0.18.8", "0.18.8", "ZeRO-3 with bf16",
        "NaN in weights after a step, now here, now there", DEEPSPEED + "pull/7898", SOURCE, along="torch>=2.10",
    ),
    Row(
        "deepspeed", "==0.19.2", "0.19.3", "ZeRO-3, bf16 model with fp32 LoRA adapters",
        "TypeError: output tensor must have the same type as input tensor", DEEPSPEED + "pull/8073", SOURCE,
    ),
    Row(
        "deepspeed", "<0.19.3", "0.19.3",
        "ZeRO-3 with PEFT and gradient checkpointing, not reentrant as by default there",
        "CheckpointError: recomputed values have different metadata, shape 0",
        DEEPSPEED + "pull/8148", SOURCE, along="transformers>=5",
    ),
    Row(
        "peft", "==0.15.0", "0.15.1", "ZeRO-3 with modules_to_save",
        "modules_to_save are lost in the saved adapter", HF + "peft/pull/2459", THREAD,
    ),
    Row(
        "accelerate", ">=0.23.0,<0.26.0", "0.26.0", "DeepSpeed on several GPUs",
        "the learning rate schedule is not that of one GPU, slower learning", HF + "accelerate/pull/2304", THREAD,
    ),
    Row(
        "accelerate", "==0.34.0", "0.34.1", "FSDP wrapping by layer class, classes not named in the config",
        "Could not find the transformer layer class, followed by one letter", HF + "accelerate/pull/3075", SOURCE,
    ),
    Row(
        "accelerate", ">=0.34.0,<1.0.0", "1.0.0", "FSDP, saving a checkpoint",
        "weights are saved flat or under the wrapper's names, and from_pretrained fails",
        HF + "accelerate/pull/3096", SOURCE,
    ),
    Row(
        "transformers", "==4.51.0", "", "ZeRO-3; 4.51.1 changes it for quantized models only",
        "training fails, axolotl's tests with ZeRO-3 do", HF + "transformers/pull/37315", THREAD,
    ),
    Row(
        "transformers", ">=5.0.0,<5.5.4", "5.5.4", "ZeRO-3 with TRL's RLOO and GRPO",
        "fails, and TRL's tests expect it to", HF + "trl/pull/5541", SOURCE,
    ),
    Row(
        "torch", "==2.7.0", "2.7.1", "init_process_group(device_id=...), NCCL 2.26",
        "random hangs in collectives", GITHUB + "pytorch/pytorch/pull/154055", THREAD,
    ),
    Row(
        "nvidia-nccl-cu12", "==2.26.2", "", "Blackwell workstation or consumer cards without NVLink",
        "illegal memory access from 512 KiB on, in nccl-tests too; 2.31.2 is clean",
        GITHUB + "NVIDIA/nccl/issues/2418", THREAD,
    ),
    Row(
        "nvidia-nccl-cu12", "==2.29.2", "2.29.3", "any",
        "hang; torch skipped this release", GITHUB + "pytorch/pytorch/pull/174338", THREAD,
    ),
    Row(
        "nvidia-nccl-cu13", "==2.29.2", "2.29.3", "any",
        "hang; torch skipped this release", GITHUB + "pytorch/pytorch/pull/174338", THREAD,
    ),
)  # fmt: skip


def numbers(text: str) -> Optional[Version]:
    """A final release as a tuple without trailing zeros, local part dropped; None for dev, pre- and post-releases."""
    match = re.match(r"v?(\d+(?:\.\d+)*)(?:\+.*)?$", text.strip())
    if not match:
        return None
    release = [int(part) for part in match.group(1).split(".")]
    while release and release[-1] == 0:
        release.pop()
    return tuple(release)


def within(version: Version, specifier: str) -> bool:
    """The part of PEP 440 that the rows use: ==, >=, <=, < and > of final releases, joined by commas."""
    compare = {"==": (0,), ">=": (0, 1), "<=": (-1, 0), "<": (-1,), ">": (1,)}
    for clause in specifier.split(","):
        operator, bound = re.match(r"(==|>=|<=|<|>)(.+)", clause.strip()).groups()  # type: ignore[union-attr]
        other = numbers(bound) or ()
        if (version > other) - (version < other) not in compare[operator]:
            return False
    return True


def check(params: Mapping[str, Any]) -> Finding:
    """Compare the rows with the packages of this interpreter."""
    rows = [row for row in ROWS if params["package"] in (None, row.package)]
    if not rows:
        return unknown(f"the table has no row about {params['package']}, which says nothing about it")
    here = {row.package: installed(row.package) for row in rows}
    present = [f"{package} {version}" for package, version in here.items() if version]
    if not present:
        return unknown(f"not installed in this interpreter: {', '.join(here)}")
    odd = [f"{package} {version}" for package, version in here.items() if version and numbers(version) is None]
    hits = [row for row in rows if matches(row, numbers(here[row.package]))]
    if hits:
        advice = "each line matters only to who uses what it names; take a release outside of its range"
        return exposed(*(say(row, here[row.package]) for row in hits), advice=advice)
    unread = f"; not a final release, so not compared: {', '.join(odd)}" if odd else ""
    return unknown(f"none of {len(rows)} rows is about {', '.join(present)}{unread}", "a table knows only its rows")


def matches(row: Row, version: Optional[Version]) -> bool:
    if version is None or not within(version, row.bad):
        return False
    if not row.along:
        return True
    package, specifier = re.match(r"([\w-]+)(.+)", row.along).groups()  # type: ignore[union-attr]
    other = numbers(installed(package))
    return other is not None and within(other, specifier)


def say(row: Row, version: str) -> str:
    bad = row.bad + (f" with {row.along}" if row.along else "")
    fixed = f"fixed in {row.fixed}" if row.fixed else "fixed in a release that was not found out"
    return f"{row.package} {version} ({bad}; {fixed}), {row.when}: {row.symptom} [{row.grade}: {row.source}]"


LENGTH = (223, 300)  # the longest sequence of the batch, rank by rank


def log_metric(ctx: Context, *, trl: str) -> None:
    """One metric, logged as ORPOTrainer of that TRL release logs it; accelerate's gather is an all_gather like this."""
    import torch

    dist = ctx.init_process_group(timeout_s=120)
    logits = torch.full((2, LENGTH[ctx.rank], 8), ctx.rank + 1.0, device=ctx.device)
    mine = {"0.16.1": logits, "0.17.0": logits.mean().reshape(1)}[trl]
    gathered: List[torch.Tensor] = [torch.zeros_like(mine) for _ in range(ctx.world_size)]
    ctx.reached()
    work = dist.all_gather(gathered, mine, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        if time.monotonic() > end:
            raise Symptom(f"the gather never completed on rank {ctx.rank}, which gave {list(mine.shape)}")
        time.sleep(0.01)
    work.wait()
    means = [piece.mean().item() for piece in gathered]
    if means != [1.0, 2.0]:
        raise Symptom(f"the gather returned wrong values on rank {ctx.rank}: means {means} of ranks 0 and 1")


def log_with_accelerate(ctx: Context, *, trl: str) -> None:
    """The same two lines with accelerate's own gather, which TRL calls."""
    import torch

    ctx.init_process_group(timeout_s=60)
    importlib.import_module("accelerate").PartialState(cpu=True)
    gather = importlib.import_module("accelerate.utils").gather
    logits = torch.full((2, LENGTH[ctx.rank], 8), ctx.rank + 1.0)
    ctx.reached()
    metric = {"0.16.1": lambda: gather(logits).mean(), "0.17.0": lambda: gather(logits.mean()).mean()}[trl]()
    if metric.item() != 1.5:
        raise Symptom(f"the metric is {metric.item():.3f} on rank {ctx.rank}, not 1.5")


MICRO_BATCHES = 8


def accumulate(ctx: Context, *, adds: bool) -> None:
    """One step of accumulation on two ranks, against the loss and the norm of the same step in one batch."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    batches = torch.randn(ctx.world_size, MICRO_BATCHES, 4, 64)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - 1).square().mean()

    kept: List[torch.Tensor] = []
    ctx.reached()
    loss = 0.0
    for batch in batches[ctx.rank]:
        part = loss_of(batch) / MICRO_BATCHES
        loss += part.item() / ctx.world_size
        gradients = torch.autograd.grad(part, list(model.parameters()))
        kept = [kept[at] + new for at, new in enumerate(gradients)] if kept and adds else list(gradients)
    mine = torch.cat([gradient.flatten() for gradient in kept] + [torch.tensor([loss])])
    mine[:-1] /= ctx.world_size
    dist.all_reduce(mine)
    whole = loss_of(batches)
    reference = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(whole, list(model.parameters()))])
    share = (mine[:-1].norm() / reference.norm()).item()
    ctx.note(loss=mine[-1].item(), reference=whole.item(), share_of_norm=share)
    assert abs(mine[-1].item() / whole.item() - 1) < 1e-4
    if abs(share - 1) > 1e-3:
        raise Symptom(
            f"the loss is {mine[-1].item():.4f}, as it should be; the gradient norm is {share:.2f} of its own"
        )


GATHERED = "as in TRL 0.16.1: logits are gathered and then averaged, 223 tokens on one rank and 300 on the other"
AVERAGED = "as in TRL 0.17.0: each rank averages, and one number is gathered"
ORPO = "TRL's ORPOTrainer and accelerate's gather; its lines of the two releases are written anew here"
ACCUMULATION = "ZeRO-2 of DeepSpeed 0.17.6 to 0.18.2, and of 0.18.3; its loop is written anew here"
TRAINER = "TRL's ORPOTrainer, whose lines of the two releases are written anew here; the gather is accelerate's"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(log_metric, trl="0.16.1"),
        expect=raised(r"op\.preamble\.length <= op\.nbytes"),
        because=GATHERED,
        fidelity="stand-in",
        stands_for=ORPO,
    ),
    treatment=Arm(
        partial(log_metric, trl="0.17.0"),
        expect=completed(),
        because=AVERAGED,
        fidelity="stand-in",
        stands_for=ORPO,
    ),
    expected_s=(0.3, 0.2),
)

probe = Probe(
    check=check,
    params={"package": Param("str", "only the rows of this package, for instance trl (default: all)")},
    experiments=(
        gloo.on_gpus(
            expect=symptom(r"the gather (never completed|returned wrong values)"), expected_s=(35, 12), deadline_s=90
        ),
        gloo,
    ),
    variants=(
        Experiment(
            name="discarded",
            control=Arm(
                partial(accumulate, adds=False),
                expect=symptom(r"the loss is \d\.\d+, as it should be; the gradient norm is 0\.[1-3]"),
                because="each micro-batch replaces the gradient of the one before it",
                fidelity="stand-in",
                stands_for=ACCUMULATION,
            ),
            treatment=Arm(
                partial(accumulate, adds=True),
                expect=completed(),
                because="each micro-batch is added, and loss and norm are those of one large batch",
                fidelity="stand-in",
                stands_for=ACCUMULATION,
            ),
            expected_s=(0.3, 0.3),
        ),
        Experiment(
            name="accelerate",
            control=Arm(
                partial(log_with_accelerate, trl="0.16.1"),
                expect=raised(r"op\.preamble\.length <= op\.nbytes"),
                because=GATHERED,
                fidelity="stand-in",
                stands_for=TRAINER,
            ),
            treatment=Arm(
                partial(log_with_accelerate, trl="0.17.0"),
                expect=completed(),
                because=AVERAGED,
                fidelity="stand-in",
                stands_for=TRAINER,
            ),
            needs=Needs(packages={"torch": ">=2.1", "accelerate": ">=0.20"}),
            deadline_s=60,
            expected_s=(3, 3),
        ),
    ),
)
