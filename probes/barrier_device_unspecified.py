"""A barrier before any other collective guesses its GPU as rank % GPU count, unless the group got a device_id."""

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

# C++ to 2.6; C++ and Python of 2.7 and 2.8; Python and C++ since 2.9.
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


def captured(directory: str, act: Callable[[], object]) -> str:
    """What C++ and Python wrote to stderr while `act` ran; it is forwarded to this process's stderr afterwards."""
    path = os.path.join(directory, "stderr.txt")
    sys.stderr.flush()
    own_stderr = os.dup(2)
    taken = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    os.dup2(taken, 2)
    try:
        act()
    finally:
        sys.stderr.flush()
        os.dup2(own_stderr, 2)
        os.close(taken)
        os.close(own_stderr)
        with open(path, errors="replace") as file:
            text = file.read()
        sys.stderr.write(text)
        sys.stderr.flush()
    return text


def wrong_guess(ctx: Context, *, named: bool) -> None:
    """Rank 1 works on GPU 2 while its barrier takes GPU 1 % 3: it needs a second communicator, rank 0 does not."""
    import torch

    mine = torch.device("cuda", 2 * ctx.rank)
    torch.cuda.set_device(mine)
    dist = ctx.init_process_group(timeout_s=90, device_id=mine if named else None)
    ctx.reached()
    dist.barrier()
    total = torch.full((4,), ctx.rank + 1.0, device=mine)
    dist.all_reduce(total)
    assert total.tolist() == [3.0] * 4, total.tolist()


def warning(ctx: Context, *, named: bool) -> None:
    """One rank on one GPU: the guess cannot be wrong, but the warning is printed anyway, and nothing fails."""
    import torch

    dist = ctx.init_process_group(timeout_s=60, device_id=ctx.device if named else None)
    ctx.reached()
    text = captured(str(ctx.dir), dist.barrier)
    total = torch.ones(4, device=ctx.device)
    dist.all_reduce(total)
    assert total.tolist() == [1.0] * 4, total.tolist()
    ctx.note(torch=torch.__version__)
    match = re.search(f".*(?:{GUESSED}).*", text)
    if match:
        raise Symptom(f"the barrier guessed its GPU and said so: {match.group(0).strip()}")


def gpus_seen() -> Tuple[int, str]:
    """How many GPUs a process sees that is started from here, and how that is known; 0 where it is not."""
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if listed is not None:
        names = [name for name in listed.split(",") if name.strip()]
        if any(name.strip().startswith("MIG") for name in names):
            return 1, "CUDA_VISIBLE_DEVICES names MIG instances, of which a process uses one"
        valid = list(itertools.takewhile(lambda name: not name.strip().startswith("-"), names))  # as CUDA reads it
        return len(valid), "by CUDA_VISIBLE_DEVICES of this shell"
    try:
        ran = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=3, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return 0, "nvidia-smi is missing or fails"
    if any(line.strip().startswith("MIG ") for line in ran.stdout.splitlines()):
        return 0, "MIG is on, so a process sees fewer GPUs than nvidia-smi lists"
    return sum(line.startswith("GPU ") for line in ran.stdout.splitlines()), "by nvidia-smi -L"


def check(params: Mapping[str, Any]) -> Finding:
    """Compare the barrier's guess with the launcher's assignment, rank by rank, as torch's source defines both."""
    visible, source = (params["visible"], "as given") if params["visible"] else gpus_seen()
    processes, nodes = params["nproc_per_node"], params["nnodes"]
    if visible < 1:
        return unknown(f"no GPU: {source}", advice="give the number: --set visible=N")
    if nodes < 1 or (processes is not None and processes < 1):
        return unknown(f"no layout: nodes {nodes}, processes on each {processes}")
    installed = release("torch")
    torch = f"torch {version('torch') or 'is not installed in this interpreter'}"
    evidence = [f"GPUs that a process sees: {visible} ({source}); {torch}"]
    if processes is None:
        return unknown(
            *evidence,
            "how many processes run on how many nodes cannot be seen from here",
            advice="--set nproc_per_node=N --set nnodes=M; --set visible=1 if every process is given one GPU only",
        )
    evidence.append(
        f"layout: nodes {nodes}, processes on each {processes}, LOCAL_RANK i works on GPU i, ranks in blocks by node"
    )
    if params["visible"] == 1 and processes > 1:
        return clear(*evidence, "each process can only guess the one GPU it sees; no two of them may see the same one")
    if processes > visible:
        return exposed(
            *evidence,
            f"LOCAL_RANK {visible} has no GPU: the guess wraps around and two ranks meet on one",
            advice=f"start at most {visible} processes on a node",
        )
    wrong = [rank for rank in range(nodes * processes) if rank % visible != rank % processes]
    if not wrong and installed < (2, 5):
        right = f"rank % {visible} is each rank's own GPU, which decides in the default group"
        return unknown(*evidence, right, "up to torch 2.4 a barrier in a subgroup guesses by the rank in that group")
    if not wrong:
        return clear(
            *evidence, f"rank % {visible} is each rank's own GPU: in this layout the warning is only a warning"
        )
    if not installed or (installed >= (2, 15) and os.environ.get("TORCH_DIST_USE_NCCL2") != "0"):
        return unknown(
            *evidence,
            "torch 2.15 and newer takes the GPU when the group is made: LOCAL_RANK, which torchrun sets, or else rank"
            f" % {visible}, wrong for {len(wrong)} of {nodes * processes} ranks; which it is cannot be seen from here",
            advice="init_process_group(..., device_id=torch.device('cuda', local_rank)) on every rank",
        )
    first = wrong[0]
    return exposed(
        *evidence,
        f"rank {first} works on GPU {first % processes}, but a barrier that comes first takes GPU {first % visible}"
        f" ({len(wrong)} of {nodes * processes} ranks differ)",
        advice="init_process_group(..., device_id=torch.device('cuda', local_rank)) on every rank",
    )


NEEDS_TORCH = {"torch": ">=2.5,!=2.7.0"}  # earlier a barrier did not ask for the device_id, and 2.7.0 hangs with it
UNNAMED = "no rank names its GPU, and the barrier is the first collective"
STOCK = {"TORCH_DIST_USE_NCCL2": "0"}  # nccl2, the default of 2.15, takes its GPU when the group is made
NAMED = "every rank names its GPU in init_process_group(device_id=...)"

probe = Probe(
    check=check,
    params={
        "visible": Param("int", "GPUs that each process sees; default: those that nvidia-smi lists"),
        "nproc_per_node": Param("int", "processes on each node"),
        "nnodes": Param("int", "nodes", 1),
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
