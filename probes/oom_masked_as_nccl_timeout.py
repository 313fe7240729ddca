"""Rank 1 skips a batch that does not fit into its memory, and the other rank only reports a timeout."""

import os
import subprocess
import sys
from functools import partial
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import limit_address_space
from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    completed,
    exposed,
    raised,
    unknown,
)

RANK_MIB = 1024  # memory of one rank: the limit of the caching allocator, or of the address space on the CPU


def train_step(ctx: Context, *, longest_batch_mib: int, timeout_s: float = 2) -> None:
    """Runs one step as in many training loops, which report and skip a batch that runs out of memory."""
    import torch

    dist = ctx.init_process_group(timeout_s=5 if ctx.backend == "nccl" else timeout_s)
    gradient = torch.zeros(1, device=ctx.device)
    dist.all_reduce(gradient)
    if ctx.device.type == "cpu":
        limit_address_space(RANK_MIB << 20)
    ctx.reached()
    batch_mib = longest_batch_mib if ctx.rank == 1 else 16
    try:
        activations = torch.empty(batch_mib << 20, dtype=torch.uint8, device=ctx.device)
    except RuntimeError as error:  # torch.OutOfMemoryError is a subclass; the CPU allocator raises the plain class
        assert "memory" in str(error)
        first_line = str(error).splitlines()[0]
        sys.stderr.write(f"ran out of memory, skipping batch: {first_line}\n")
        ctx.note(out_of_memory=first_line)
    else:
        gradient += activations.numel() >> 20
        dist.all_reduce(gradient)
        assert gradient.item() == 16 + longest_batch_mib
    ctx.meet("step", timeout_s=20)  # as in training, the rank that skipped is alive and busy elsewhere


def check(_: Mapping[str, Any]) -> Finding:
    """Does one GPU start with less free memory than the others? Then its rank runs out first."""
    try:
        free = free_mib_per_gpu()
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return unknown(f"kb cannot read the free memory of the GPUs: {' '.join(str(error).split())[:200]}")
    if len(free) < 2:
        return unknown(f"kb sees {len(free)} GPUs, and needs at least 2 to compare")
    evidence = [f"GPU {name}: {mib} MiB free of {total} MiB" for name, mib, total in free]
    least, most = min(mib for _, mib, _ in free), max(mib for _, mib, _ in free)
    if len({total for _, _, total in free}) > 1:
        return unknown(*evidence, "the GPUs differ in size, so the smallest runs out first if the batches are alike")
    if most - least > 1024:
        message = f"another process uses {most - least} MiB of one GPU"
        return exposed(*evidence, message, advice="find the process with nvidia-smi, and end it if it is yours")
    return unknown(
        *evidence,
        "all GPUs have about the same free memory, so the job makes the ranks differ, usually by its longest batch",
    )


def free_mib_per_gpu() -> List[Tuple[str, int, int]]:
    """Index, free and total MiB of each GPU of this job."""
    query = ["nvidia-smi", "--query-gpu=index,memory.free,memory.total", "--format=csv,noheader,nounits"]
    output = subprocess.run(
        query, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=3, check=True, text=True
    ).stdout
    rows = [[cell.strip() for cell in line.split(",")] for line in output.splitlines() if line.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").replace(" ", "").split(",")
    if all(name.isdigit() for name in visible):  # leaves out the GPUs of other jobs
        rows = [row for row in rows if row[0] in visible]
    elif visible != [""]:
        raise ValueError("CUDA_VISIBLE_DEVICES does not use numbers, so kb cannot tell which GPUs belong to this job")
    return [(index, int(free), int(total)) for index, free, total in rows]


TOO_LONG = "the batch of rank 1 exceeds its memory, so rank 1 skips the batch and the all-reduce"
FITS = "the batch of rank 1 fits into its memory, so rank 1 joins the all-reduce"
WATCHDOG = rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
SAME_GPU = "nccl between two GPUs; both ranks use one GPU and gloo, but the out-of-memory error is that of CUDA"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(train_step, longest_batch_mib=4 * RANK_MIB),
        expect=raised(GLOO_TIMEOUT),
        because=TOO_LONG,
        fidelity="cpu",
    ),
    treatment=Arm(partial(train_step, longest_batch_mib=64), expect=completed(), because=FITS, fidelity="cpu"),
    expected_s=(3.2, 0.1),
)

more_time = Experiment(
    name="longer-timeout",
    control=Arm(
        partial(train_step, longest_batch_mib=4 * RANK_MIB, timeout_s=6),
        expect=raised(GLOO_TIMEOUT),
        because=f"{TOO_LONG}, and a timeout three times as long does not help",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(train_step, longest_batch_mib=64, timeout_s=6), expect=completed(), because=FITS, fidelity="cpu"
    ),
    expected_s=(7, 0.1),
)

probe = Probe(
    check=check,
    experiments=(
        gloo.on_gpus(expect=raised(WATCHDOG), gpu_memory_mib=RANK_MIB),
        Experiment(
            name="cuda-gloo",
            control=Arm(
                partial(train_step, longest_batch_mib=4 * RANK_MIB),
                expect=raised(GLOO_TIMEOUT),
                because=TOO_LONG,
                fidelity="stand-in",
                stands_for=SAME_GPU,
            ),
            treatment=Arm(
                partial(train_step, longest_batch_mib=64),
                expect=completed(),
                because=FITS,
                fidelity="stand-in",
                stands_for=SAME_GPU,
            ),
            needs=Needs(gpus=1, gpu_memory_mib=RANK_MIB),
            deadline_s=60,
            settle_s=2,
            expected_s=(15, 10),
        ),
        gloo,
    ),
    variants=(more_time,),
)
