"""The forms in which jobs are launched, and what each makes of the lines of its ranks.

Slurm, Open MPI and Kubernetes are played: their prefixes, their order of ending and their last words are as they print
them, the processes are real. Everything else is the launcher itself.
"""

from __future__ import annotations

import datetime
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

GRACE_S = 12.0  # how long a launcher without a kill policy waits for the others after the first bad end
SIGNALS = {-6: "Aborted (core dumped)", -9: "Killed", -11: "Segmentation fault (core dumped)", -15: "Terminated"}
TORCHRUN_FLAGS = {
    "torchrun": (),
    "tee": ("--tee", "3"),
    "logdir": ("--log-dir", "logs", "--redirects", "3"),
    "cri": (),
    "compose": (),
    "restart": ("--max-restarts", "2"),
    "restart-tee": ("--max-restarts", "2", "--tee", "3"),
}


@dataclass(frozen=True)
class Start:
    """What is to be started: a script with arguments on some ranks, where, and with which environment."""

    python: Path
    script: str
    arguments: tuple[str, ...]
    world: int
    folder: Path
    env: Mapping[str, str]
    deadline_s: float
    absent: int | None = None  # a rank that nobody starts


def launched(form: str, start: Start, log: Path) -> int:
    """Run the job in this form; its log is written to `log`, the exit code of the launcher returned."""
    with log.open("ab") as out:
        if form in ("srun", "srun-kill", "srun-buffered"):
            return srun(start, out, kills=form == "srun-kill", buffered=form == "srun-buffered")
        if form == "mpirun":
            return mpirun(start, out)
        return agent(form, start, out)


def agent(form: str, start: Start, out: IO[bytes]) -> int:
    """A launcher that is one process: torchrun, accelerate, deepspeed, or the program itself."""
    binaries, world = start.python.parent, str(start.world)
    ours = (start.script, *start.arguments)
    if form == "python":
        command = [str(start.python), "-u", *ours]
    elif form == "accelerate":
        command = [str(binaries / "accelerate"), "launch", "--multi_gpu", "--num_processes", world, *ours]
    elif form == "deepspeed":
        command = [str(binaries / "deepspeed"), "--num_gpus", world, *ours]
    else:
        module = [str(start.python), "-m", "torch.distributed.run", "--standalone"]
        command = [*module, "--nproc-per-node", world, *TORCHRUN_FLAGS[form], *ours]
    split = form in ("cri", "compose")
    process = subprocess.Popen(
        command,
        cwd=start.folder,
        env=dict(start.env),
        stdin=subprocess.PIPE,  # kept open: who reads from it waits
        stdout=subprocess.PIPE if split else out,
        stderr=subprocess.PIPE if form == "cri" else subprocess.STDOUT,
    )
    pumps = []
    if form == "cri":
        pumps = [pump(process.stdout, out, cri_prefix("stdout")), pump(process.stderr, out, cri_prefix("stderr"))]
    elif form == "compose":
        pumps = [pump(process.stdout, out, constant("trainer-1  | "))]
    code = ended(process, start.deadline_s)
    for each in pumps:
        each.join(5)
    return code


def ended(process: subprocess.Popen[bytes], deadline_s: float) -> int:
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            return process.wait(40)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()


LOCK = threading.Lock()


def pump(pipe: IO[bytes] | None, out: IO[bytes], prefix: Callable[[bytes], bytes]) -> threading.Thread:
    """Copy lines with a prefix, as a collector of container logs or a launcher does."""
    assert pipe is not None

    def copy() -> None:
        for line in pipe:
            with LOCK:
                out.write(prefix(line) + line.rstrip(b"\n") + b"\n")
                out.flush()

    thread = threading.Thread(target=copy, daemon=True)
    thread.start()
    return thread


def constant(text: str) -> Callable[[bytes], bytes]:
    return lambda _: text.encode()


def cri_prefix(stream: str) -> Callable[[bytes], bytes]:
    def prefix(_: bytes) -> bytes:
        now = time.time_ns()
        clock = datetime.datetime.fromtimestamp(now // 10**9, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")
        return f"{clock}.{now % 10**9:09d}Z {stream} F ".encode()

    return prefix


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def tasks(start: Start, buffered: bool, names: Mapping[str, str]) -> list[subprocess.Popen[bytes]]:
    """One process a rank without an agent; `names`: which variables of the launcher hold rank and world as well."""
    port = free_port()
    common = {**start.env, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(start.world)}
    command = [str(start.python), *(() if buffered else ("-u",)), start.script, *start.arguments]
    started = []
    for rank in range(start.world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), **{key: str(rank) for key in names}}
        if rank == start.absent:
            continue
        started.append(
            subprocess.Popen(
                command,
                cwd=start.folder,
                env={**common, **own},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
    return started


def wait_for(
    processes: Sequence[subprocess.Popen[bytes]], deadline_s: float, grace_s: float
) -> tuple[int | None, set[int]]:
    """Wait for all; after the first bad end only so long. Returns who ended badly first, and who was ended from here."""
    until, first = time.monotonic() + deadline_s, None
    while any(each.poll() is None for each in processes) and time.monotonic() < until:
        bad = [index for index, each in enumerate(processes) if each.poll() not in (None, 0)]
        if bad and first is None:
            first, until = bad[0], min(until, time.monotonic() + grace_s)
        time.sleep(0.05)
    alive = {index for index, each in enumerate(processes) if each.poll() is None}
    for index in alive:
        processes[index].terminate()
    until = time.monotonic() + 10
    while any(each.poll() is None for each in processes) and time.monotonic() < until:
        time.sleep(0.05)
    for each in processes:
        if each.poll() is None:
            each.kill()
            each.wait()
    return first, alive


def srun(start: Start, out: IO[bytes], kills: bool, buffered: bool) -> int:
    """`srun -l`, with or without --kill-on-bad-exit."""
    processes = tasks(start, buffered, {"SLURM_PROCID": "", "SLURM_LOCALID": ""})
    ranks = [rank for rank in range(start.world) if rank != start.absent]
    wide = len(str(start.world - 1))
    pumps = [
        pump(pipe, out, constant(f"{rank:{wide}d}: "))
        for rank, each in zip(ranks, processes, strict=True)
        for pipe in (each.stdout, each.stderr)
    ]
    _, cancelled = wait_for(processes, start.deadline_s, 0.6 if kills else GRACE_S)
    if cancelled:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S")
        step = f"{40000 + os.getpid()}.0"
        out.write(b"srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n")
        out.write(f"slurmstepd: error: *** STEP {step} ON node-1 CANCELLED AT {clock} ***\n".encode())
    for each in pumps:
        each.join(5)
    codes = {rank: each.returncode for rank, each in zip(ranks, processes, strict=True)}
    for code in sorted({code for code in codes.values() if code}, reverse=True):
        those = [rank for rank in ranks if codes[rank] == code]
        kind = f"Exited with exit code {code}" if code > 0 else SIGNALS.get(code, f"signal {-code}")
        plural = "tasks" if len(those) > 1 else "task"
        out.write(f"srun: error: node-1: {plural} {ranges(those)}: {kind}\n".encode())
    return max((code if code > 0 else 128 - code for code in codes.values() if code), default=0)


def ranges(ranks: Sequence[int]) -> str:
    """0,2-3 for 0, 2, 3, as Slurm writes them."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][1] == rank - 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in parts)


def mpirun(start: Start, out: IO[bytes]) -> int:
    """`mpirun --tag-output`, which ends all ranks at the first bad end."""
    processes = tasks(start, False, {"OMPI_COMM_WORLD_RANK": "", "OMPI_COMM_WORLD_LOCAL_RANK": ""})
    ranks = [rank for rank in range(start.world) if rank != start.absent]
    pumps = [
        pump(pipe, out, constant(f"[1,{rank}]<{name}>:"))
        for rank, each in zip(ranks, processes, strict=True)
        for name, pipe in (("stdout", each.stdout), ("stderr", each.stderr))
    ]
    first, _ = wait_for(processes, start.deadline_s, 0.3)
    for each in pumps:
        each.join(5)
    if first is None:
        return 0
    code = processes[first].returncode
    rule = "-" * 74
    if code < 0:
        name = {-9: "Killed", -11: "Segmentation fault", -6: "Aborted"}.get(code, "Terminated")
        text = (
            f"{rule}\nmpirun noticed that process rank {ranks[first]} with PID 0 on node node-1 exited on signal "
            f"{-code} ({name}).\n{rule}\n"
        )
    else:
        text = (
            f"{rule}\nPrimary job  terminated normally, but 1 process returned\na non-zero exit code. Per user-direction,"
            f" the job has been aborted.\n{rule}\n{rule}\nmpirun detected that one or more processes exited with non-zero"
            " status, thus causing\nthe job to be terminated. The first process to do so was:\n\n"
            f"  Process name: [[{os.getpid() % 60000},1],{ranks[first]}]\n  Exit code:    {code}\n{rule}\n"
        )
    out.write(text.encode())
    return code if code > 0 else 128 - code
