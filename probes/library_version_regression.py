"""The check compares installed packages with known bad releases; the experiments rewrite two of these faults."""

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
    """One range of bad releases. `bad` and `along` are PEP 440; `fixed` is "" if the fixed release is unknown."""

    package: str
    bad: str
    fixed: str
    when: str
    symptom: str
    source: str
    grade: str
    along: str = ""  # the fault only shows together with this package, "torch>=2.10"


ROWS = (
    Row(
        "trl", ">=0.14.0,<0.17.0", "0.17.0", "ORPO and CPO, multiple GPUs",
        "ORPO and CPO gather whole logits, whose length differs per rank: hang at step 0, or wrong values",
        HF + "trl/pull/3069", SOURCE,
    ),
    Row(
        "trl", "==0.15.0", "0.15.1", "SFT, multiple GPUs",
        "SFT gathers logits and labels of unequal length: hang", HF + "trl/pull/2890", SOURCE,
    ),
    Row(
        "trl", ">=0.16.0,<0.17.0", "0.17.0", "SFT with padding_free, multiple GPUs",
        "SFT gathers a count that is on the CPU, which NCCL cannot do", HF + "trl/pull/3245", SOURCE,
    ),
    Row(
        "trl", ">=0.21.0,<0.23.0", "0.23.0", "GRPO with top_entropy_quantile below 1",
        "GRPO gathers entropies of unequal length: hang", HF + "trl/pull/3964", SOURCE,
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
        "DeepSpeed reads the world size as 1, so train_batch_size does not add up", DEEPSPEED + "issues/3228", THREAD,
    ),
    Row(
        "deepspeed", ">=0.9.2,<0.10.0", "0.10.0", "bf16 or fp32 with ZeRO-1 or ZeRO-2",
        "DeepSpeed silently does not clip gradients", DEEPSPEED + "pull/3790", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.9.3,<0.9.5", "0.9.5", "ZeRO-3 with zero.Init",
        "silently worse results: DeepSpeed does not broadcast parameters and buffers at the start",
        DEEPSPEED + "pull/3611", THREAD,
    ),
    Row(
        "deepspeed", ">=0.9.3,<0.9.5", "0.9.5", "ZeRO-3 with zero.Init",
        "DeepSpeed leaves the model on the CPU: weights and inputs on different devices, cuda and cpu",
        DEEPSPEED + "issues/3678", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.11.2,<0.12.4", "0.12.4", "pipeline parallelism with a loss in bf16 or fp16",
        "the last stage broadcasts the loss in bf16 or fp16, the others receive float32 and report 0",
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
        "its import sets the start method to spawn: Can't pickle local object, or the script runs again",
        DEEPSPEED + "pull/7349", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.17.6,<0.18.3", "0.18.3", "ZeRO-2 with gradient accumulation, no CPU offload",
        "DeepSpeed silently keeps only the last micro-batch; the gradient norm is far too small",
        DEEPSPEED + "blob/v0.18.2/deepspeed/runtime/zero/stage_1_and_2.py", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.18.3,<0.19.6", "0.19.6",
        "ZeRO-2, bf16, accumulation, a submodule called both through the engine and directly",
        "part of the gradient silently has the wrong scale", DEEPSPEED + "issues/8224", THREAD,
    ),
    Row(
        "deepspeed", ">=0.18.5,<0.18.7", "0.18.7", "ZeRO-1 to ZeRO-3",
        "the backward is slower, because every gradient hook does more work", DEEPSPEED + "pull/7886", SOURCE,
    ),
    Row(
        "deepspeed", ">=0.18.3,<0.19.0", "0.19.0", "bf16, grad_accum_dtype fp32, ZeRO-1, no CPU offload",
        "DeepSpeed silently does not average the last micro-batch over the ranks", DEEPSPEED + "pull/7985", SOURCE,
    ),
    Row(
        "deepspeed", "<0.18.8", "0.18.8", "ZeRO-3 with bf16",
        "NaN in weights after a step, in changing places", DEEPSPEED + "pull/7898", SOURCE, along="torch>=2.10",
    ),
    Row(
        "deepspeed", "==0.19.2", "0.19.3", "ZeRO-3, bf16 model with fp32 LoRA adapters",
        "TypeError: output tensor must have the same type as input tensor", DEEPSPEED + "pull/8073", SOURCE,
    ),
    Row(
        "deepspeed", "<0.19.3", "0.19.3",
        "ZeRO-3 with PEFT and non-reentrant gradient checkpointing, the default there",
        "CheckpointError: recomputed values have different metadata, shape 0",
        DEEPSPEED + "pull/8148", SOURCE, along="transformers>=5",
    ),
    Row(
        "peft", "==0.15.0", "0.15.1", "ZeRO-3 with modules_to_save",
        "the saved adapter lacks modules_to_save", HF + "peft/pull/2459", THREAD,
    ),
    Row(
        "accelerate", ">=0.23.0,<0.26.0", "0.26.0", "DeepSpeed on multiple GPUs",
        "the learning rate schedule differs from that on one GPU: slower learning", HF + "accelerate/pull/2304", THREAD,
    ),
    Row(
        "accelerate", "==0.34.0", "0.34.1", "FSDP wrapping by layer class, if the config names no classes",
        "Could not find the transformer layer class, followed by a single letter", HF + "accelerate/pull/3075", SOURCE,
    ),
    Row(
        "accelerate", ">=0.34.0,<1.0.0", "1.0.0", "FSDP, saving a checkpoint",
        "accelerate saves weights flat or under the wrapper's names, and from_pretrained fails",
        HF + "accelerate/pull/3096", SOURCE,
    ),
    Row(
        "transformers", "==4.51.0", "", "ZeRO-3; 4.51.1 fixes it only for quantized models",
        "training fails, and axolotl's tests with ZeRO-3 fail too", HF + "transformers/pull/37315", THREAD,
    ),
    Row(
        "transformers", ">=5.0.0,<5.5.4", "5.5.4", "ZeRO-3 with TRL's RLOO and GRPO",
        "training fails, and TRL's tests expect it to fail", HF + "trl/pull/5541", SOURCE,
    ),
    Row(
        "torch", "==2.7.0", "2.7.1", "init_process_group(device_id=...), NCCL 2.26",
        "random hangs in collectives", GITHUB + "pytorch/pytorch/pull/154055", THREAD,
    ),
    Row(
        "nvidia-nccl-cu12", "==2.26.2", "", "Blackwell workstation or consumer cards without NVLink",
        "illegal memory access from 512 KiB on, also in nccl-tests; 2.31.2 does not have the fault",
        GITHUB + "NVIDIA/nccl/issues/2418", THREAD,
    ),
    Row(
        "nvidia-nccl-cu12", "==2.29.2", "2.29.3", "any",
        "NCCL hangs; torch skipped this release", GITHUB + "pytorch/pytorch/pull/174338", THREAD,
    ),
    Row(
        "nvidia-nccl-cu13", "==2.29.2", "2.29.3", "any",
        "NCCL hangs; torch skipped this release", GITHUB + "pytorch/pytorch/pull/174338", THREAD,
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
    """Compares the rows with the packages of this interpreter."""
    rows = [row for row in ROWS if params["package"] in (None, row.package)]
    if not rows:
        return unknown(
            f"kb's table has no row about {params['package']}, so kb cannot tell whether your release is bad"
        )
    here = {row.package: installed(row.package) for row in rows}
    present = [f"{package} {version}" for package, version in here.items() if version]
    if not present:
        return unknown(f"this interpreter has none of the packages in kb's table: {', '.join(here)}")
    not_final = [f"{package} {version}" for package, version in here.items() if version and numbers(version) is None]
    hits = [row for row in rows if matches(row, numbers(here[row.package]))]
    if hits:
        advice = "if you use what a line names, install a release outside its range; otherwise ignore that line"
        return exposed(*(describe(row, here[row.package]) for row in hits), advice=advice)
    skipped = f"; not compared, because not a final release: {', '.join(not_final)}" if not_final else ""
    message = f"none of {len(rows)} rows is about {', '.join(present)}{skipped}"
    return unknown(message, "a release that is in no row may still be bad")


def matches(row: Row, version: Optional[Version]) -> bool:
    if version is None or not within(version, row.bad):
        return False
    if not row.along:
        return True
    package, specifier = re.match(r"([\w-]+)(.+)", row.along).groups()  # type: ignore[union-attr]
    other = numbers(installed(package))
    return other is not None and within(other, specifier)


def describe(row: Row, version: str) -> str:
    bad = row.bad + (f" with {row.along}" if row.along else "")
    fixed = f"fixed in {row.fixed}" if row.fixed else "nobody found out which release fixes it"
    return f"{row.package} {version} ({bad}; {fixed}), {row.when}: {row.symptom} [{row.grade}: {row.source}]"


LENGTH = (223, 300)  # the longest sequence of the batch, rank by rank


def log_metric(ctx: Context, *, trl: str) -> None:
    """Logs one metric as ORPOTrainer of that TRL release does; accelerate's gather is an all_gather like this one."""
    import torch

    dist = ctx.init_process_group(timeout_s=120)
    logits = torch.full((2, LENGTH[ctx.rank], 8), ctx.rank + 1.0, device=ctx.device)
    metric = {"0.16.1": logits, "0.17.0": logits.mean().reshape(1)}[trl]
    gathered: List[torch.Tensor] = [torch.zeros_like(metric) for _ in range(ctx.world_size)]
    ctx.reached()
    work = dist.all_gather(gathered, metric, async_op=True)
    end = time.monotonic() + 20
    while not work.is_completed():
        if time.monotonic() > end:
            raise Symptom(
                f"the gather never completed on rank {ctx.rank}, which passed a tensor of shape {list(metric.shape)}"
            )
        time.sleep(0.01)
    work.wait()
    means = [piece.mean().item() for piece in gathered]
    if means != [1.0, 2.0]:
        raise Symptom(f"the gather returned wrong values on rank {ctx.rank}: means {means} of ranks 0 and 1")


def log_with_accelerate(ctx: Context, *, trl: str) -> None:
    """Logs the same metric with accelerate's gather, which TRL calls."""
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
    """Compares loss and gradient norm of one accumulated step on two ranks with those of the same step in one batch."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 64)
    batches = torch.randn(ctx.world_size, MICRO_BATCHES, 4, 64)

    def loss_of(batch: torch.Tensor) -> torch.Tensor:
        return (model(batch) - 1).square().mean()

    accumulated: List[torch.Tensor] = []
    ctx.reached()
    loss = 0.0
    for batch in batches[ctx.rank]:
        part = loss_of(batch) / MICRO_BATCHES
        loss += part.item() / ctx.world_size
        gradients = torch.autograd.grad(part, list(model.parameters()))
        if accumulated and adds:
            accumulated = [accumulated[at] + new for at, new in enumerate(gradients)]
        else:
            accumulated = list(gradients)
    reduced = torch.cat([gradient.flatten() for gradient in accumulated] + [torch.tensor([loss])])
    reduced[:-1] /= ctx.world_size
    dist.all_reduce(reduced)
    whole = loss_of(batches)
    reference = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(whole, list(model.parameters()))])
    share = (reduced[:-1].norm() / reference.norm()).item()
    ctx.note(loss=reduced[-1].item(), reference=whole.item(), share_of_norm=share)
    assert abs(reduced[-1].item() / whole.item() - 1) < 1e-4
    if abs(share - 1) > 1e-3:
        raise Symptom(
            f"the loss is {reduced[-1].item():.4f}, as it should be; the gradient norm is {share:.2f} of the right one"
        )


GATHERED = "the ranks gather whole logits, of 223 and 300 tokens, as in TRL 0.16.1"
AVERAGED = "each rank averages its logits and gathers one number, as in TRL 0.17.0"
ORPO = "TRL's ORPOTrainer and accelerate's gather; the probe rewrites the lines of the two TRL releases"
ACCUMULATION = "ZeRO-2 of DeepSpeed 0.17.6 to 0.18.2, and of 0.18.3; the probe rewrites its loop"
TRAINER = "TRL's ORPOTrainer; the probe rewrites its lines of the two releases, and calls accelerate's gather"

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
    params={"package": Param("str", "check only the rows about this package, for example trl (default: all)")},
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
                because="each micro-batch replaces the gradient of the previous one",
                fidelity="stand-in",
                stands_for=ACCUMULATION,
            ),
            treatment=Arm(
                partial(accumulate, adds=True),
                expect=completed(),
                because="the gradients of all micro-batches are added up, as in one large batch",
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
