"""Two ranks of one communicator use one GPU, which NCCL refuses. On CPU: how launchers assign a GPU twice."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import time
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

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


def all_reduce(ctx: Context, *, gpu_of_its_own: bool = False, backend: str = "nccl") -> None:
    """Both ranks use the first GPU, unless each has its own. gloo goes through host memory and allows this."""
    import torch

    ctx.backend = backend
    device = torch.device("cuda", ctx.rank if gpu_of_its_own else 0)
    torch.cuda.set_device(device)
    dist = ctx.init_process_group(timeout_s=60, **({"device_id": None} if backend == "nccl" else {}))
    ctx.reached()
    total = torch.full((4,), ctx.rank + 1.0, device=device)
    dist.all_reduce(total)  # the first collective: NCCL compares the GPUs of all ranks here
    assert total.tolist() == [3.0] * 4, total.tolist()
    ctx.note(device=str(device))


def launch(ctx: Context, *, launchers: int) -> None:
    """Starts four ranks on one host with one torchrun, or with two of them as `srun --ntasks-per-node=2` does."""
    import torch.distributed.run

    job = Path(ctx.path("job.py"))
    job.write_text("import os\nopen('got-' + os.environ['RANK'], 'w').write(os.environ['LOCAL_RANK'])\n")
    arguments = ["--nnodes", str(launchers), "--nproc-per-node", str(4 // launchers), "--local-addr", "127.0.0.1"]
    arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", ctx.path("rdzv"), "--rdzv-conf", "store_type=file"]
    fork = multiprocessing.get_context("fork")
    ctx.reached()
    launches = [
        fork.Process(target=torch.distributed.run.main, args=([*arguments, str(job)],)) for _ in range(launchers)
    ]
    for process in launches:
        process.start()
    for process in launches:
        process.join(25)
    assert [process.exitcode for process in launches] == [0] * launchers, "torchrun failed"
    gpus: Dict[str, List[int]] = {}
    for rank in range(4):
        gpus.setdefault(Path(ctx.path(f"got-{rank}")).read_text(), []).append(rank)
    ctx.note(ranks_by_local_rank=gpus)
    for local_rank, ranks in gpus.items():
        if len(ranks) > 1:
            raise Symptom(
                f"on one host rank {ranks[1]} and rank {ranks[0]} both take GPU {local_rank}, their LOCAL_RANK"
            )


# --- the check: which GPU does each rank that runs here have? ---------------------------------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Do two ranks that run on this host use one GPU? If no rank runs, are there enough GPUs?"""
    gpus, used = driver()
    if not gpus and not glob("/dev/nvidia[0-9]*"):
        return unknown("kb finds no GPU: there is no /dev/nvidia0, and nvidia-smi is missing or lists none")
    tasks, launcher = tasks_of_the_step(), os.environ.get("TORCHELASTIC_RUN_ID")
    if launcher and tasks > 1:
        why = f"torchrun runs inside one of {tasks} Slurm tasks per node"
        if os.environ.get("LOCAL_WORLD_SIZE") in (None, "1"):
            return unknown(why, "each torchrun starts one rank, which is right only if each task has its own GPU")
        why += ", and each task starts ranks for several GPUs"
        return exposed(why, advice="use --ntasks-per-node=1 with torchrun, or srun python without torchrun")
    result, complete = ranks_here()
    evidence = [f"rank {rank}: pid {pid}, {gpu}" for (_, rank), (pid, gpu) in sorted(result.items())][:16]
    doubt = "the launcher assigned each rank a different GPU, but the code may choose another one"
    for (job, rank), (_, gpu) in result.items():
        for (other_job, other), (_, taken) in result.items():
            if job == other_job and int(rank) < int(other) and gpu == taken:
                why = f"the launcher assigned {gpu} to both rank {rank} and rank {other} of one job"
                if is_one_device(gpu, result[job, rank][0], result[job, other][0], used):
                    return exposed(why, *evidence, advice="start one launcher per host, and one GPU per LOCAL_RANK")
                doubt = f"{why}, but each Slurm task or container may count its GPUs from 0: compare the UUIDs"
    for uuid, pids in used.items():
        ranks = sorted((job, rank) for (job, rank), (pid, _) in result.items() if pid in pids)
        if len(ranks) > len({job for job, _ in ranks}):
            why = f"ranks {', '.join(rank for _, rank in ranks)} have a context on {uuid}"
            elsewhere = {pid for other, pids in used.items() if other != uuid for pid in pids}
            only_here = [(job, rank) for job, rank in ranks if result[job, rank][0] not in elsewhere]
            if len(only_here) > len({job for job, _ in only_here}):
                return exposed(
                    why, *evidence, advice="call torch.cuda.set_device(LOCAL_RANK) before anything touches CUDA"
                )
            return unknown(
                why, "they also have one on another GPU, and kb cannot tell which of the two they use", *evidence
            )
    if result:
        if complete and all(any(pid in pids for pids in used.values()) for pid, _ in result.values()):
            return clear("the driver shows each rank that runs here alone on its GPU", *evidence)
        return unknown(doubt, *evidence)
    count, visible = params["nproc_per_node"], visible_entries() or gpus
    if count and visible and count > visible:
        why = f"{count} processes share {visible} GPUs: LOCAL_RANK {visible} and above have no GPU"
        return exposed(why, advice=f"use --nproc-per-node={visible}, or gloo for a test on fewer GPUs")
    if count and visible:
        return unknown(f"{visible} GPUs are enough for {count} processes if each uses the GPU of its LOCAL_RANK")
    return unknown(
        "this user has no process with RANK, LOCAL_RANK and MASTER_PORT on this host",
        advice="run the check on the host while the job starts or hangs, or use --set nproc_per_node=8",
    )


def is_one_device(gpu: str, pid: int, other: int, used: Dict[str, List[int]]) -> bool:
    """Whether one number or UUID means one GPU: not across cgroups, and not if the driver shows two GPUs."""
    if gpu.startswith("GPU GPU-"):
        return True
    first, second = ({uuid for uuid, pids in used.items() if at in pids} for at in (pid, other))
    if first and second and not first & second:
        return False
    try:
        return Path(f"/proc/{pid}/cgroup").read_bytes() == Path(f"/proc/{other}/cgroup").read_bytes()
    except OSError:
        return False


def tasks_of_the_step() -> int:
    """Tasks per node of this srun; 0 outside of srun, where a batch script starts each process once."""
    text = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    return max((int(number) for number in re.findall(r"(?:^|,)(\d+)", text)), default=0)  # "8(x2),4"


def ranks_here() -> Tuple[Dict[Tuple[str, str], Tuple[int, str]], bool]:
    """(job, RANK) to (first pid, GPU), from the variables of the processes; and whether kb read all of them."""
    result: Dict[Tuple[str, str], Tuple[int, str]] = {}
    end = time.monotonic() + 0.4
    for path in sorted(glob("/proc/[0-9]*/environ"), key=lambda item: int(item.split("/")[2])):
        if time.monotonic() > end:
            return result, False
        try:
            pairs = Path(path).read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        rank, local = variables.get("RANK", ""), variables.get("LOCAL_RANK", "")
        if not (re.fullmatch("[0-9]{1,7}", rank) and re.fullmatch("[0-9]{1,7}", local) and "MASTER_PORT" in variables):
            continue
        job = f"{variables.get('MASTER_ADDR')}:{variables['MASTER_PORT']}"
        entries = [item for item in variables.get("CUDA_VISIBLE_DEVICES", "").split(",") if item]
        if len(entries) > int(local):
            gpu = f"GPU {entries[int(local)]}"
        else:
            gpu = f"GPU {entries[0]}" if len(entries) == 1 else f"GPU {local}"
        result.setdefault(
            (job, rank), (int(path.split("/")[2]), gpu)
        )  # child processes of a rank have the same variables
    return result, True


def driver() -> Tuple[int, Dict[str, List[int]]]:
    """The number of GPUs that nvidia-smi lists, and GPU UUID to its pids, which a container may hide."""
    used: Dict[str, List[int]] = {}
    try:
        options = {"capture_output": True, "text": True, "errors": "replace", "timeout": 3, "check": False}
        listed = subprocess.run(["nvidia-smi", "-L"], **options).stdout  # type: ignore[call-overload]
        apps = subprocess.run(  # type: ignore[call-overload]
            ["nvidia-smi", "--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader"], **options
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0, used
    for uuid, pid in re.findall(r"^(GPU-\S+), (\d+)$", apps, re.MULTILINE):
        used.setdefault(uuid, []).append(int(pid))
    return len(re.findall(r"^GPU \d+:", listed, re.MULTILINE)), used


def visible_entries() -> int:
    return len([item for item in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if item.strip()])


REFUSED = raised(r"Duplicate GPU detected : rank \d+ and rank \d+|Multiple [Rr]anks (are|detected) using the same GPU")
BOTH_ON_0 = "both ranks use device 0, and join one communicator"
STANDS_FOR = (
    "NCCL, which compares host and GPU of all ranks; the probe compares host and LOCAL_RANK of torchrun processes"
)

probe = Probe(
    params={"nproc_per_node": Param("int", "number of processes that the launcher starts on one host, for the check")},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(all_reduce, expect=REFUSED, because=BOTH_ON_0, fidelity="hardware"),
            treatment=Arm(
                partial(all_reduce, gpu_of_its_own=True),
                expect=completed(),
                because="each rank uses its own GPU",
                fidelity="hardware",
            ),
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=120,
            settle_s=5,
            expected_s=(15, 15),
        ),
        Experiment(
            name="one-gpu",
            control=Arm(all_reduce, expect=REFUSED, because=BOTH_ON_0, fidelity="hardware"),
            treatment=Arm(
                partial(all_reduce, backend="gloo"),
                expect=completed(),
                because="the backend is gloo, which lets two ranks share a GPU",
                fidelity="hardware",
            ),
            backend="nccl",
            needs=Needs(gpus=1),
            deadline_s=120,
            settle_s=5,
            expected_s=(15, 15),
        ),
        Experiment(
            name="launcher",
            control=Arm(
                partial(launch, launchers=2),
                expect=symptom(r"on one host rank \d+ and rank \d+ both take GPU \d+"),
                because="two launchers run on one host, and each numbers its ranks from LOCAL_RANK 0",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            treatment=Arm(
                partial(launch, launchers=1),
                expect=completed(),
                because="one launcher starts all four ranks of the host",
                fidelity="stand-in",
                stands_for=STANDS_FOR,
            ),
            world_size=1,
            deadline_s=40,
            expected_s=(3, 3),
        ),
    ),
)
