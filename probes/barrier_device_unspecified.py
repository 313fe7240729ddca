"""A barrier before any other collective guesses its GPU as rank % GPU count, unless the group has a device_id."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Tuple

from kb.packages import release, version
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
    raised,
    symptom,
    unknown,
)

# Messages of C++ up to 2.6; of C++ and Python in 2.7 and 2.8; of Python and C++ since 2.9.
GUESSED = (
    r"using (best-guess )?GPU \d+\s+(to perform barrier )?as devices? used by this process (are|is) currently unknown"
    r"|No device id is provided via `init_process_group` or `barrier `"
    r"|barrier\(\): using the device under current context"
    r"|Guessing device ID based on global rank"
)
SECOND_COMMUNICATOR = (
    r"retrieving ncclUniqueId from \[0\] via c10d key-value store by key '[1-9]\d*'.*"
    r"(Timeout waiting|wait timeout|Socket Timeout)"
)


def capture_stderr(directory: str, function: Callable[[], object]) -> str:
    """The text that C++ and Python write to stderr in `function`; it also goes to this process's stderr afterwards."""
    path = os.path.join(directory, "stderr.txt")
    sys.stderr.flush()
    stderr = os.dup(2)
    file_descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(file_descriptor, 2)
    try:
        function()
    finally:
        sys.stderr.flush()
        os.dup2(stderr, 2)
        os.close(file_descriptor)
        os.close(stderr)
        with open(path, errors="replace") as file:
            text = file.read()
        sys.stderr.write(text)
        sys.stderr.flush()
    return text


def wrong_guess(ctx: Context, *, named: bool) -> None:
    """Rank 1 uses GPU 2, but its barrier uses GPU 1 % 3, so only rank 1 needs a second communicator."""
    import torch

    device = torch.device("cuda", 2 * ctx.rank)
    torch.cuda.set_device(device)
    dist = ctx.init_process_group(timeout_s=90, device_id=device if named else None)
    ctx.reached()
    dist.barrier()
    total = torch.full((4,), ctx.rank + 1.0, device=device)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 4, total.tolist()


def warning(ctx: Context, *, named: bool) -> None:
    """One rank on one GPU: the guess cannot be wrong and nothing fails, but torch prints the warning anyway."""
    import torch

    dist = ctx.init_process_group(timeout_s=60, device_id=ctx.device if named else None)
    ctx.reached()
    text = capture_stderr(str(ctx.dir), dist.barrier)
    total = torch.ones(4, device=ctx.device)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 4, total.tolist()
    ctx.note(torch=torch.__version__)
    match = re.search(f".*(?:{GUESSED}).*", text)
    if match:
        raise Symptom(f"the barrier guessed its GPU and printed: {match.group(0).strip()}")


def visible_gpus() -> Tuple[int, str]:
    """The number of GPUs that a process started here sees, and the source; 0 if kb cannot tell."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name for name in listed.split(",") if name.strip()]
        if any(name.strip().startswith("MIG") for name in names):
            return 1, "CUDA_VISIBLE_DEVICES names MIG instances, and a process uses one of them"
        valid = list(itertools.takewhile(lambda name: not name.strip().startswith("-"), names))  # as CUDA reads it
        return len(valid), "from CUDA_VISIBLE_DEVICES of this shell"
    try:
        ran = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=3, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0, "nvidia-smi is missing or fails"
    if any(line.strip().startswith("MIG ") for line in ran.stdout.splitlines()):
        return 0, "MIG is on, so a process sees fewer GPUs than nvidia-smi lists"
    return sum(line.startswith("GPU ") for line in ran.stdout.splitlines()), "from nvidia-smi -L"


NAME_GPU = "call init_process_group(..., device_id=torch.device('cuda', local_rank)) on every rank"


def check(params: Mapping[str, Any]) -> Finding:
    """Does the barrier's guess match the launcher's assignment on every rank?"""
    visible, source = (params["visible"], "from --set visible") if params["visible"] else visible_gpus()
    processes, nodes = params["nproc_per_node"], params["nnodes"]
    if visible < 1:
        return unknown(f"kb finds no GPU: {source}", advice="--set visible=N, the number of GPUs that a process sees")
    if nodes < 1 or (processes is not None and processes < 1):
        return unknown(f"nnodes={nodes} and nproc_per_node={processes} must be at least 1")
    installed = release("torch")
    torch = f"torch {version('torch') or 'is not installed in this interpreter'}"
    evidence = [f"a process sees {visible} GPUs ({source}); {torch}"]
    if processes is None:
        return unknown(
            *evidence,
            "kb cannot tell how many processes run on how many nodes",
            advice="--set nproc_per_node=N --set nnodes=M; add --set visible=1 if every process sees only one GPU",
        )
    evidence.append(
        f"layout: {nodes} nodes with {processes} processes each; LOCAL_RANK i uses GPU i, ranks are in blocks by node"
    )
    if params["visible"] == 1 and processes > 1:
        return clear(
            *evidence,
            "each process can only guess the one GPU that it sees, as long as no two processes see the same one",
        )
    if processes > visible:
        return exposed(
            *evidence,
            f"LOCAL_RANK {visible} has no GPU: the guess wraps around, and two ranks use one GPU",
            advice=f"start at most {visible} processes on a node",
        )
    wrong = [rank for rank in range(nodes * processes) if rank % visible != rank % processes]
    if not wrong and installed < (2, 5):
        right = f"in the default group, rank % {visible} is the right GPU for every rank"
        return unknown(*evidence, right, "up to torch 2.4, a barrier in a subgroup guesses by the rank in that group")
    if not wrong:
        return clear(
            *evidence, f"rank % {visible} is the right GPU for every rank, so the warning is harmless in this layout"
        )
    if not installed or (installed >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"):
        return unknown(
            *evidence,
            "torch 2.15 and newer chooses the GPU when it creates the group: LOCAL_RANK if set (torchrun sets it), "
            f"else rank % {visible}, wrong for {len(wrong)} of {nodes * processes} ranks; kb cannot tell which applies",
            advice=NAME_GPU,
        )
    first = wrong[0]
    return exposed(
        *evidence,
        f"rank {first} uses GPU {first % processes}, but a barrier that comes first uses GPU {first % visible}"
        f" ({len(wrong)} of {nodes * processes} ranks differ)",
        advice=NAME_GPU,
    )


NEEDS_TORCH = {"torch": ">=2.5,!=2.7.0"}  # earlier barriers ignore the device_id, and 2.7.0 hangs with it
UNNAMED = "no rank names its GPU, and the barrier is the first collective"
STOCK = {"TORCH_DIST_USE_NCCL2": "0"}  # nccl2, the default of 2.15, chooses its GPU when torch creates the group
NAMED = "every rank names its GPU in init_process_group(device_id=...)"

probe = Probe(
    check=check,
    params={
        "visible": Param("int", "number of GPUs that each process sees (default: those that nvidia-smi lists)"),
        "nproc_per_node": Param("int", "number of processes on each node"),
        "nnodes": Param("int", "number of nodes", 1),
    },
    experiments=(
        Experiment(
            name="wrong-guess",
            control=Arm(
                partial(wrong_guess, named=False),
                expect=raised(SECOND_COMMUNICATOR),
                because=UNNAMED,
                fidelity="hardware",
                env=STOCK,
            ),
            treatment=Arm(
                partial(wrong_guess, named=True), expect=completed(), because=NAMED, fidelity="hardware", env=STOCK
            ),
            backend="nccl",
            needs=Needs(gpus=3, packages=NEEDS_TORCH),
            deadline_s=120,
            settle_s=3,
            expected_s=(35, 15),
        ),
        Experiment(
            name="warning",
            control=Arm(
                partial(warning, named=False), expect=symptom(GUESSED), because=UNNAMED, fidelity="hardware", env=STOCK
            ),
            treatment=Arm(
                partial(warning, named=True), expect=completed(), because=NAMED, fidelity="hardware", env=STOCK
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1, packages=NEEDS_TORCH),
            deadline_s=90,
            expected_s=(12, 12),
        ),
    ),
)
