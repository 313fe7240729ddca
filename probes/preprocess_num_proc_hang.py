"""A pool is forked, as `Dataset.map(num_proc=...)` does, from a process whose OpenMP threads have already worked."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any, Mapping

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, hung, unknown

PATIENCE_S = 1.5  # a healthy pool answers in a few hundredths of a second
SAMPLE_S = 0.4
IDLE_TICKS = 3  # of 40 a core: datasets forks a queue besides its workers, and asks it 20 times a second


def featurize(size: int) -> float:
    """One item of the map: an operation that is large enough for torch to split it over its OpenMP threads."""
    import torch

    return float(torch.ones(size).exp().mean())


def preprocess(ctx: Context, *, threads_per_worker: int) -> None:
    import math
    import multiprocessing
    import os
    import signal

    import torch

    torch.set_num_threads(2)  # arms get OMP_NUM_THREADS=1; a process that nobody limits has one per core
    featurize(1 << 20)  # the parent has used its OpenMP threads: from here on a second one exists
    ctx.note(threads_of_parent=len(os.listdir("/proc/self/task")))
    ctx.reached()
    with multiprocessing.get_context("fork").Pool(2, torch.set_num_threads, (threads_per_worker,)) as pool:
        answers = pool.map_async(featurize, [1 << 20] * 4)
        answers.wait(PATIENCE_S)
        if not answers.ready():
            worker = multiprocessing.active_children()[0].pid
            assert worker
            os.kill(worker, signal.SIGUSR1)  # its stack goes where ours will go
        assert all(math.isclose(answer, math.e, rel_tol=1e-4) for answer in answers.get())


def check(params: Mapping[str, Any]) -> Finding:
    """Are the workers of the seemingly frozen process working? Reads /proc twice, 0.4 s apart."""
    pid = params["pid"]
    if pid is None:
        return unknown("no process was named", advice="--set pid=PID, the process that draws the progress bar")
    try:
        workers = _forks_of(pid)
    except OSError:
        return unknown("there is no process %d here, or it belongs to somebody else" % pid)
    if not workers:
        return unknown("process %d has no forked workers" % pid, advice="name the process that draws the progress bar")
    before = {worker: _ticks(worker) for worker in workers}
    time.sleep(SAMPLE_S)
    seen = [_look(worker, before[worker]) for worker in workers]
    message = [
        "worker %(pid)d: %(state)s in %(where)s, %(threads)d threads, %(ticks)d ticks of CPU" % item for item in seen
    ]
    evidence = ["%d forked workers of process %d, watched for %.1f s" % (len(seen), pid, SAMPLE_S), *message[:8]]
    if sum(item["ticks"] for item in seen) > IDLE_TICKS:
        return clear(*evidence, "some use the CPU: the map is slow, not frozen")
    if any(item["state"] == "D" for item in seen):
        return unknown(*evidence, "some wait for a disk", advice="look at the storage first")
    stuck = [item["pid"] for item in seen if "futex" in item["where"]]
    if len(stuck) == len(seen):
        return exposed(
            *evidence,
            "all of them sleep on a lock and use no CPU to speak of",
            advice="gdb -p %d -batch -ex bt: gomp_team_barrier_wait_end in the only thread confirms it" % stuck[0],
        )
    return unknown(*evidence, "idle, but not all on a lock: as a pool without work", advice="py-spy dump --pid PID")


def _forks_of(pid: int) -> list[int]:
    """Children that run the same program with the same arguments: forked, not executed."""
    command = Path("/proc/%d/cmdline" % pid).read_bytes()
    result = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and status.with_name("cmdline").read_bytes() == command:
                result.append(int(status.parent.name))
        except (OSError, IndexError):
            continue  # it has just ended
    return sorted(result)


def _ticks(pid: int) -> int:
    try:
        fields = Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _look(pid: int, ticks_before: int) -> dict[str, Any]:
    process = Path("/proc/%d" % pid)
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        where = (process / "wchan").read_text() or "?"
        threads = sum(1 for _ in (process / "task").iterdir())
    except OSError:
        state, where, threads = "?", "?", 0
    return {"pid": pid, "state": state, "where": where, "threads": threads, "ticks": _ticks(pid) - ticks_before}


probe = Probe(
    check=check,
    params={"pid": Param("int", "the process whose map or filter seems frozen")},
    experiments=(
        Experiment(
            name="openmp",
            control=Arm(
                partial(preprocess, threads_per_worker=2),
                expect=hung(r"preprocess_num_proc_hang\.py\", line \d+ in featurize\n.*\bin mapstar\b"),
                because="the workers wait for OpenMP threads that did not come along with the fork",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(preprocess, threads_per_worker=1),
                expect=completed(),
                because="the workers use one thread each and need no other",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=10,
            expected_s=(5.2, 0.2),
        ),
    ),
)
