"""A process asks for a device number that is beyond the GPUs in its CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Tuple
from unittest.mock import patch

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


@contextmanager
def devices(ctx: Context, visible: str) -> Iterator[List[int]]:
    """Records the devices that a process asks for. Without CUDA, torch counts those in CUDA_VISIBLE_DEVICES."""
    import torch

    asked: List[int] = []
    if ctx.device.type == "cuda":
        yield asked
        return

    def set_device(device: int) -> None:
        count = torch.cuda.device_count()
        asked.append(device)
        if device >= count:
            raise Symptom(f"invalid device ordinal: rank {ctx.rank} asks for device {device}, {count} visible")

    os.environ["CUDA_VISIBLE_DEVICES"] = visible
    stubs: Any = {"device_count": lambda: len(torch.cuda._parse_visible_devices()), "set_device": set_device}
    with patch.multiple(torch.cuda, is_available=lambda: True, **stubs):
        yield asked


def choose(ctx: Context, *, by: str) -> None:
    """Two processes act as two nodes of one GPU each: LOCAL_RANK is 0 on both, RANK is 0 and 1."""
    import torch

    on_gpu = ctx.device.type == "cuda"
    os.environ["LOCAL_RANK"] = "0"
    ctx.reached()
    with devices(ctx, "5") as asked:  # this process sees GPU 5 of the node as device 0
        if by == "LOCAL_RANK":
            local_rank = int(os.environ["LOCAL_RANK"])
            assert local_rank < torch.cuda.device_count(), (local_rank, torch.cuda.device_count())
            torch.cuda.set_device(local_rank)
        else:
            torch.cuda.set_device(int(os.environ[by]))
    ctx.note(asked_for=asked)
    if on_gpu:
        assert torch.ones(4, device="cuda").sum().item() == 4


def count_processes(ctx: Context, *, nproc_per_node: str) -> None:
    """torchrun reads --nproc_per_node on a host with two visible GPUs, and each rank takes its device in turn."""
    import torch
    from torch.distributed.run import determine_local_world_size

    with devices(ctx, "2,3"):
        ctx.reached()
        processes = determine_local_world_size(nproc_per_node)
        ctx.note(processes=processes)
        for local_rank in range(processes):
            torch.cuda.set_device(local_rank)


def share(ctx: Context, *, visible: str) -> None:
    """Two processes on one host take device LOCAL_RANK modulo the number of devices, as accelerate does."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    with devices(ctx, visible) as asked:
        ctx.reached()
        torch.cuda.set_device(ctx.rank % torch.cuda.device_count())
    card = torch.tensor([int(visible.split(",")[asked[-1]])])
    cards = [torch.zeros_like(card) for _ in range(2)]
    dist.all_gather(cards, card)
    if cards[0] == cards[1]:
        raise Symptom(f"no error, and ranks 0 and 1 both have card {card.item()}")


def launch(ctx: Context, *, options: List[str]) -> None:
    """DeepSpeed's launcher on eight devices of its CPU accelerator; each rank records its CUDA_VISIBLE_DEVICES."""
    job = Path(ctx.path("job.py"))
    job.write_text("import os\nopen('got-' + os.environ['RANK'], 'w').write(os.environ['CUDA_VISIBLE_DEVICES'])\n")
    variables = {"CUDA_VISIBLE_DEVICES": "4,5", "DS_ACCELERATOR": "cpu", "LOCAL_SIZE": "8"}
    ctx.reached()
    ran = subprocess.run(
        [sys.executable, "-m", "deepspeed.launcher.runner", *options, str(job)],
        env={**os.environ, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    got = [Path(ctx.path(f"got-{rank}")).read_text() for rank in range(2)] if ran.returncode == 0 else [ran.stdout]
    match = re.search(r"Detected .*", ran.stdout)
    if any(devices != "4,5" for devices in got):
        raise Symptom(f"the scheduler gave devices 4,5, the ranks have {got}: {match.group() if match else ran.stdout}")


def check(params: Mapping[str, Any]) -> Finding:
    """Are there as many GPUs as processes on this host, by the entries of CUDA_VISIBLE_DEVICES that CUDA accepts?"""
    uuids, divided, instances = nvidia_smi_list()
    variable = params["visible"] if params["visible"] is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
    if variable is None and not uuids:
        return unknown("CUDA_VISIBLE_DEVICES is not set, and nvidia-smi is missing or lists no GPU")
    entries, accepted = visible(variable, uuids)
    seen = len(accepted)
    setting = f"CUDA_VISIBLE_DEVICES={variable}" if variable is not None else "CUDA_VISIBLE_DEVICES is not set"
    evidence = [f"{setting}; nvidia-smi lists {len(uuids) or 'no'} GPUs", f"a process sees {seen} of {entries} entries"]
    is_mig = variable is not None and "MIG-" in variable
    if (is_mig and seen < entries) or (seen > 1 and any(uuid in divided for uuid in accepted)):
        one = "CUDA gives a process only one MIG instance"
        mig = one if is_mig else "MIG is on, but CUDA_VISIBLE_DEVICES names no MIG instance"
        return exposed(*evidence, mig, advice="CUDA_VISIBLE_DEVICES=MIG-..., one instance for each process")
    if seen < entries:
        cut = "CUDA ignores the list from the first entry that is not a GPU, and the whole list if it repeats a GPU"
        return exposed(*evidence, cut, advice="use numbers or whole UUIDs from nvidia-smi -L, each once")
    processes, source = processes_here(params["nproc_per_node"])
    if not processes:
        return unknown(*evidence, "kb does not know the number of processes", advice="--set nproc_per_node=8")
    evidence.append(f"{processes} processes on this host ({source})")
    if processes > seen == 1:
        per_task = "if --gpus-per-task=1 gives each task another GPU, use device 0 in every task, or --gpus-per-node"
        advice = f"{per_task}; otherwise start 1 process, or make {processes} GPUs visible"
        return exposed(*evidence, advice=advice)
    if processes > seen:
        fewer = f"start {seen} processes, or " if seen else ""
        return exposed(*evidence, advice=f"{fewer}make {processes} GPUs visible to each; look for a lost card")
    if source == "SLURM_NTASKS_PER_NODE" or binds_later():  # a task may start torchrun, or see only one of the GPUs
        as_rank = "run this check as a rank runs (srun, torchrun)"
        as_rank += "" if source == "as given" else ", or --set nproc_per_node=8"
        hidden = "kb cannot see here how many ranks a task starts, and which GPUs a task sees"
        return unknown(*evidence, hidden, advice=as_rank)
    if not uuids:
        where = "run this check on the node of the job, where nvidia-smi lists its GPUs"
        return unknown(*evidence, "kb cannot see here whether these GPUs exist", advice=where)
    if is_mig and not any(instance.startswith(accepted[-1]) for instance in instances):
        absent = f"nvidia-smi -L lists no {accepted[-1]} here; an instance gets a new name when it is created again"
        return unknown(*evidence, absent)
    if divided and not is_mig and len(uuids) > 1:
        return unknown(*evidence, "MIG is on for some GPUs, and kb does not know how CUDA numbers the others")
    fits = "there are enough GPUs, but kb cannot see which of them the program takes as its device"
    return clear(*evidence, fits)


def binds_later() -> bool:
    """Is this a batch script whose srun will give each task its own GPUs?"""
    per_task = os.environ.get("SLURM_GPUS_PER_TASK") or "gpu" in os.environ.get("SLURM_TRES_PER_TASK", "")
    return bool(per_task) and "SLURM_STEP_ID" not in os.environ


def nvidia_smi_list() -> Tuple[List[str], List[str], List[str]]:
    """The UUIDs of all GPUs, of those that are divided into MIG instances, and of the instances."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, errors="replace", timeout=3, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return [], [], []
    uuids = re.findall(r"^GPU \d+:.*\(UUID: (GPU-[^)]+)\)", ran.stdout, re.MULTILINE)
    divided = re.findall(r"^GPU \d+:.*\(UUID: (GPU-[^)]+)\)\n +MIG .*\(UUID: MIG-", ran.stdout, re.MULTILINE)
    return uuids, divided, re.findall(r"\(UUID: +(MIG-[^)]+)\)", ran.stdout)


def visible(variable: Any, uuids: List[str]) -> Tuple[int, List[str]]:
    """How many entries the variable has, and the devices that CUDA accepts.

    CUDA accepts the entries before the first invalid one, none at all if one repeats, and only the first of several
    MIG instances (MIG user guide, "CUDA_VISIBLE_DEVICES").
    """
    if variable is None:
        return len(uuids), uuids
    hides_all = variable.strip() in ("", "-1")
    entries = [] if hides_all else [entry.strip() for entry in variable.split(",")]
    accepted: List[str] = []
    for entry in entries:
        if entry.startswith("MIG-"):
            return len(entries), accepted or [entry]
        if not uuids and re.match(r"GPU-|[0-9]{1,4}$", entry):
            device = entry  # without nvidia-smi, kb cannot look it up
        elif entry.startswith("GPU-"):
            matching = [uuid for uuid in uuids if uuid.startswith(entry)]
            device = matching[0] if len(matching) == 1 else ""  # a prefix of two UUIDs names no GPU
        else:
            device = uuids[int(entry)] if re.match(r"[0-9]{1,4}$", entry) and int(entry) < len(uuids) else ""
        if not device:
            break
        accepted.append(device)
    return len(entries), [] if len(set(accepted)) < len(accepted) else accepted


def processes_here(given: Any) -> Tuple[int, str]:
    if given:
        return max(given, 0), "as given"
    for name in ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if re.match(r"[0-9]{1,6}$", os.environ.get(name, "")):
            return int(os.environ[name]), name
    return 0, ""


EIGHT = "eight GPUs; here DeepSpeed's CPU accelerator counts eight devices, because LOCAL_SIZE is 8"
COUNTED = "the GPUs; here torch counts the devices in CUDA_VISIBLE_DEVICES, without CUDA"


def counted(
    name: str, fails: Callable[[Context], None], works: Callable[[Context], None], pattern: str, because: str, fix: str
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(fails, symptom(pattern), because, "model", COUNTED),
        treatment=Arm(works, completed(), fix, "model", COUNTED),
        world_size=1 if name == "too-many" else 2,
        expected_s=(0.2, 0.2),
    )


model = counted(
    "model",
    partial(choose, by="RANK"),
    partial(choose, by="LOCAL_RANK"),
    r"invalid device ordinal: rank 1 asks for device 1, 1 visible",
    because="the script chooses the device by RANK, which does not start at 0 on the second node",
    fix="the script chooses the device by LOCAL_RANK, which starts at 0 on every node",
)

probe = Probe(
    check=check,
    params={
        "visible": Param("str", "value of CUDA_VISIBLE_DEVICES (default: that of this environment)"),
        "nproc_per_node": Param("int", "processes on this host (default: from the launcher's variables)"),
    },
    experiments=(
        model.on_gpus(gpus=1, expect=raised(r"invalid device ordinal"), expected_s=(10.0, 10.0)),
        model,
    ),
    variants=(
        counted(
            "number-in-the-list",
            partial(choose, by="CUDA_VISIBLE_DEVICES"),
            partial(choose, by="LOCAL_RANK"),
            r"invalid device ordinal: rank \d asks for device 5, 1 visible",
            because="the script uses the number in CUDA_VISIBLE_DEVICES as the device",
            fix="the script uses the position in CUDA_VISIBLE_DEVICES as the device",
        ),
        counted(
            "too-many",
            partial(count_processes, nproc_per_node="8"),
            partial(count_processes, nproc_per_node="gpu"),
            r"invalid device ordinal: rank 0 asks for device 2, 2 visible",
            because="torchrun starts eight processes, but only two GPUs are visible",
            fix="--nproc_per_node=gpu makes torchrun start one process per visible GPU",
        ),
        counted(
            "modulo",
            partial(share, visible="5"),
            partial(share, visible="5,6"),
            r"ranks 0 and 1 both have card 5",
            because="one GPU is visible, so LOCAL_RANK modulo the number of GPUs gives both processes the same card",
            fix="two GPUs are visible, one for each process",
        ),
        Experiment(
            name="deepspeed",
            control=Arm(
                partial(launch, options=["--num_gpus", "2"]),
                symptom(r"gave devices 4,5, the ranks have \['0,1', '0,1'\].*but ignoring it"),
                "--num_gpus makes DeepSpeed's launcher ignore CUDA_VISIBLE_DEVICES and use devices from 0",
                "stand-in",
                EIGHT,
            ),
            treatment=Arm(
                partial(launch, options=[]),
                completed(),
                "without --num_gpus DeepSpeed's launcher uses the devices in CUDA_VISIBLE_DEVICES",
                "stand-in",
                EIGHT,
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1", "deepspeed": ">=0.14"}),
            deadline_s=90,
            expected_s=(9.0, 9.0),
        ),
    ),
)
