"""A job is killed, but one of its processes survives with the GPU's files open, so the next job finds the GPU in use.

Without a GPU, a locked file stands in for it: the kernel frees the lock, as the driver frees the memory, when the last
process that has the file open closes it or ends.
"""

from __future__ import annotations

import fcntl
import inspect
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, Iterator, List, Mapping, Sequence, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    symptom,
    unknown,
)

GPU_FILES = "/dev/nvidia"


def close_gpu_files() -> None:
    for handle in os.listdir("/proc/self/fd"):
        try:
            path = os.readlink(f"/proc/self/fd/{handle}")
        except OSError:
            continue
        if path.startswith(GPU_FILES):
            os.close(int(handle))


def close_in_children() -> None:
    os.register_at_fork(after_in_child=close_gpu_files)


TAKE_GPU = """
import fcntl, os, sys, time

GPU_FILES, on_gpu = sys.argv[1], sys.argv[2] == "cuda"
if on_gpu:
    import torch
    held = torch.ones(128 << 20, device="cuda")  # 512 MiB
else:
    held = os.open(GPU_FILES, os.O_RDWR)
    fcntl.flock(held, fcntl.LOCK_EX)
"""

WAIT = """
print(os.getpid(), file=open("running", "w"), flush=True)
time.sleep(120)
"""

LOAD = """
from torch.utils.data import DataLoader, IterableDataset

class Samples(IterableDataset):
    def __iter__(self):
        yield 0
        print(os.getpid(), file=open("running", "w"), flush=True)
        time.sleep(120)  # the storage of the second sample does not answer

iterator = iter(DataLoader(Samples(), num_workers=1, multiprocessing_context="fork"))
next(iterator)
time.sleep(120)
"""

LEAVE = """
if os.fork() == 0:
    print(os.getpid(), file=open("running", "w"), flush=True)
time.sleep(120)
"""


def run_rank(ctx: Context, program: str, options: Sequence[str] = ()) -> Tuple[Any, int]:
    """Starts a rank that takes the GPU; returns its process, or its launcher's, and the pid that is to survive it.

    With `options`, torchrun starts the rank. Both are forks, so they need not import torch again.
    """
    Path("rank.py").write_text(TAKE_GPU + program)
    Path("running").touch()
    arguments = ["rank.py", gpu_file(ctx), ctx.device.type]
    main = import_module("torch.distributed.run").main if options else run_script
    process = multiprocessing.get_context("fork").Process(target=main, args=([*options, *arguments],))
    process.start()
    end = time.monotonic() + 40
    while not Path("running").read_text().strip() and process.is_alive() and time.monotonic() < end:
        time.sleep(0.02)
    return process, int(Path("running").read_text())


def run_script(arguments: List[str]) -> None:
    """Does what `python rank.py ...` does."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")


def gpu_file(ctx: Context) -> str:
    if ctx.device.type == "cuda":
        return GPU_FILES
    Path("nvidia0").touch()
    return ctx.path("nvidia0")


def used_mib(ctx: Context) -> int:
    if ctx.device.type != "cuda":
        return 0
    return int(query("--query-gpu=memory.used", "-i", os.environ["CUDA_VISIBLE_DEVICES"])[0][0])


def start_next_job(ctx: Context, before_mib: int, survivor: int) -> None:
    """Takes the memory of the GPU, or the lock; waits as long as the driver needs to free it."""
    end = time.monotonic() + (5 if ctx.device.type == "cuda" else 0.5)
    with open(gpu_file(ctx), "r+") if ctx.device.type != "cuda" else nullcontext() as file:
        while time.monotonic() < end:
            with suppress(BlockingIOError):
                if file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if used_mib(ctx) - before_mib < 256:
                    return
            time.sleep(0.05)
    has = "which has it open" if survivor in holders(gpu_file(ctx)) else "which does not have it open"
    raise Symptom(f"the GPU is still held: the job was killed, and process {survivor} of it lives, {has}")


@contextmanager
def ended(pid: int) -> Iterator[None]:
    """Ends this process afterwards, if it is still alive."""
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def holders(path: str) -> List[int]:
    """The processes that have a file with this prefix open, as far as this user may see."""
    pids = []
    for folder in Path("/proc").glob("[0-9]*/fd"):
        try:
            if any(os.readlink(link).startswith(path) for link in folder.iterdir()):
                pids.append(int(folder.parent.name))
        except OSError:
            continue  # the process has ended, or belongs to another user
    return pids


def kill_rank(ctx: Context, *, closes: bool) -> None:
    """Kills a rank while its DataLoader worker waits for storage, and starts the next job."""
    before = used_mib(ctx)
    source = inspect.getsource(close_gpu_files) + inspect.getsource(close_in_children) + "close_in_children()\n"
    program = source + LOAD if closes else LOAD
    rank, worker = run_rank(ctx, program)
    with ended(worker):
        ctx.reached()
        rank.kill()
        rank.join()
        start_next_job(ctx, before, worker)


def find_holders(ctx: Context, *, ends: bool) -> None:
    """A killed rank leaves a child behind; with `ends`, the next job first ends what has the GPU file open."""
    rank, child = run_rank(ctx, LEAVE)
    with ended(child):
        rank.kill()
        rank.join()
        ctx.reached()
        for pid in holders(ctx.path("nvidia0")) if ends else ():
            os.kill(pid, signal.SIGTERM)
        start_next_job(ctx, 0, child)


def kill_launcher(ctx: Context, *, by: signal.Signals) -> None:
    """Ends torchrun with a signal, and starts the next job."""
    # Without --local-addr torchrun would resolve the name of the host, which some containers cannot do.
    options = ["--standalone", "--local-addr=localhost", "--nproc-per-node=1"]
    launcher, rank = run_rank(ctx, WAIT, options)
    with ended(rank):
        ctx.reached()
        os.kill(launcher.pid, by)
        launcher.join(20)
        start_next_job(ctx, 0, rank)


# --- the check: which GPUs are in use, by which processes, and may a second process use them? ------------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Reads the memory, compute mode and processes of each GPU, and finds who has the GPU files open."""
    gpus = query("--query-gpu=index,uuid,memory.used,memory.total,compute_mode")
    if not gpus or any(len(gpu) != 5 for gpu in gpus):
        advice = "run this check on the node of the job, as root; if nvidia-smi hangs, look for processes in state D"
        return unknown("nvidia-smi is missing, does not answer, or does not list the GPUs", advice=advice)
    apps = query("--query-compute-apps=gpu_uuid,pid")
    evidence = []
    for index, uuid, used, total, mode in gpus:
        pids = ", ".join(app[1] for app in apps if app[0] == uuid and app[1:]) or "no process that nvidia-smi lists"
        if not used.isdecimal():
            return unknown(f"nvidia-smi does not say how much memory GPU {index} uses ({used}), perhaps due to MIG")
        if int(used) > params["idle_mib"]:
            evidence.append(f"GPU {index}: {used} of {total} MiB used, by {pids}")
        elif mode == "Prohibited" or (mode.startswith("Exclusive") and pids[0].isdigit()):
            evidence.append(f"GPU {index}: compute mode {mode}, used by {pids}; it refuses a new process")
    if not evidence and all(gpu[4] == "Default" for gpu in gpus):
        return clear(f"all {len(gpus)} GPUs use {params['idle_mib']} MiB or less and are in compute mode Default")
    if not evidence:
        return unknown("a GPU may accept only one process, and kb cannot see whether it already has one")
    pids = ", ".join(map(str, holders(GPU_FILES))) or "none that kb may see"
    advice = "end those that are yours, by their id; in a container, or as a plain user, look on the host as root"
    return exposed(*evidence, f"processes that have GPU files open: {pids}", advice=advice)


def query(*what: str) -> List[List[str]]:
    command = ["nvidia-smi", *what, "--format=csv,noheader,nounits"]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return []
    try:
        output = process.communicate(timeout=3)[0]
    except subprocess.TimeoutExpired:
        process.kill()  # kb does not wait for it, because in state D it does not end
        return []
    lines = output.decode(errors="replace").splitlines() if process.returncode == 0 else []
    return [[field.strip() for field in line.split(",")] for line in lines if line.strip()]


LOCK = "the driver, which frees memory when the last process closes the GPU; the kernel frees a file lock in this way"


def held(
    name: str, fails: Callable[[Context], None], works: Callable[[Context], None], because: Tuple[str, str]
) -> Experiment:
    pattern = r"the GPU is still held: the job was killed, and process \d+ of it lives, which has it open"
    return Experiment(
        name=name,
        control=Arm(fails, symptom(pattern), because[0], "stand-in", LOCK),
        treatment=Arm(works, completed(), because[1], "stand-in", LOCK),
        world_size=1,
        deadline_s=60,
        expected_s=(2.0, 1.0),
    )


inherited = held(
    "inherited",
    partial(kill_rank, closes=False),
    partial(kill_rank, closes=True),
    (
        "the DataLoader worker inherited the open GPU files of the killed rank and survives it",
        "the DataLoader worker closes the GPU files as soon as it is forked",
    ),
)

probe = Probe(
    check=check,
    params={"idle_mib": Param("int", "MiB of memory that an idle GPU may use, for the check", 1024)},
    experiments=(inherited.on_gpus(gpus=1), inherited),
    variants=(
        held(
            "holders-ended",
            partial(find_holders, ends=False),
            partial(find_holders, ends=True),
            (
                "the next job starts while a child of the killed rank has the GPU file open",
                "the next job first ends the processes that have the GPU file open",
            ),
        ),
        held(
            "launcher",
            partial(kill_launcher, by=signal.SIGKILL),
            partial(kill_launcher, by=signal.SIGTERM),
            (
                "SIGKILL ends torchrun before it can end its rank, which keeps the GPU",
                "torchrun gets SIGTERM and ends its rank",
            ),
        ),
    ),
)
