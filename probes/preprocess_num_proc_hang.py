"""`Dataset.map(num_proc=...)` forks a pool from a process that has already used its OpenMP threads, and hangs."""

from __future__ import annotations

import re
import time
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Mapping

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
    hung,
    symptom,
    unknown,
)

PATIENCE_S = 1.5  # a healthy pool answers within a few hundredths of a second
SAMPLE_S = 0.4
IDLE_TICKS = 3  # of 40 per core; datasets also forks a process for a queue, which it polls 20 times a second


def featurize(size: int) -> float:
    """One item of the map: an operation large enough for torch to split it over its OpenMP threads."""
    import torch

    return float(torch.ones(size).exp().mean())


def featurize_alone(size: int) -> float:
    """The function of the map with the fix, which first limits torch to one thread."""
    import torch

    torch.set_num_threads(1)
    return featurize(size)


def preprocess(
    ctx: Context, *, alone: bool = False, parent_threads: int = 2, parent_has_worked: bool = True, measured: bool = True
) -> None:
    import math
    import multiprocessing
    import os
    import signal

    import torch

    torch.set_num_threads(parent_threads)  # kb sets OMP_NUM_THREADS=1 for arms; the default is one thread per core
    if parent_has_worked:
        featurize(1 << 20)  # the parent uses its OpenMP threads: from here on a second one exists
    ctx.note(threads_of_parent=len(os.listdir("/proc/self/task")))
    ctx.reached()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        answers = pool.map_async(featurize_alone if alone else featurize, [1 << 20] * 4)
        workers = [worker.pid or 0 for worker in multiprocessing.active_children()]
        idle_s, spent = 0.0, 0
        while idle_s < PATIENCE_S and not answers.ready():  # on a busy machine they are slow, but not idle
            answers.wait(0.5)
            before, spent = spent, sum(_ticks(worker) for worker in workers)
            idle_s = idle_s + 0.5 if spent == before else 0.0
        if not answers.ready():
            os.kill(workers[0], signal.SIGUSR1)  # it prints its stack to our stderr
            if measured:
                raise Symptom(f"{len(workers)} workers returned nothing and have used {spent} ticks of CPU")
        assert all(math.isclose(answer, math.e, rel_tol=1e-4) for answer in answers.get())


LOCKED = """
import threading
lock = threading.Lock()

def count(text):
    with lock:
        return len(text)
"""


def preprocess_with_lock(ctx: Context, *, method: str) -> None:
    """Without torch: another thread of the parent holds a lock during the fork, and the function acquires that lock."""
    import importlib
    import multiprocessing
    import sys
    import threading

    (ctx.dir / "locked.py").write_text(LOCKED)
    sys.path.insert(0, str(ctx.dir))  # a spawned worker imports the function from there
    locked: Any = importlib.import_module("locked")
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with locked.lock:
            held.set()
            done.wait(20)

    threading.Thread(target=hold, daemon=True).start()
    held.wait(5)
    ctx.reached()
    with multiprocessing.get_context(method).Pool(2) as pool:
        answers = pool.map_async(locked.count, ["four", "five"])
        answers.wait(PATIENCE_S if method == "fork" else 15)
        done.set()  # a forked worker has a copy of the lock, which stays locked
        answers.wait(PATIENCE_S)
        if not answers.ready():
            spent = sum(_ticks(worker.pid or 0) for worker in multiprocessing.active_children())
            raise Symptom(f"2 workers returned nothing and have used {spent} ticks of CPU; the parent's lock is free")
        assert answers.get() == [4, 4]


def check(params: Mapping[str, Any]) -> Finding:
    """Do the workers of a process that seems frozen use the CPU? Reads /proc twice, 0.4 s apart."""
    pid = params["pid"]
    if pid is None:
        return unknown("no process was named", advice="run --set pid=PID, the process that draws the progress bar")
    try:
        workers = _forks_of(pid)
    except OSError:
        return unknown("this machine has no process %d, or it belongs to another user" % pid)
    if not workers:
        return unknown(
            "process %d has no forked workers" % pid,
            advice="run --set pid=PID, the process that draws the progress bar",
        )
    before = {worker: _ticks(worker) for worker in workers}
    time.sleep(SAMPLE_S)
    return _judge(pid, [_sample(worker, before[worker]) for worker in workers])


def _judge(pid: int, samples: list[dict[str, Any]]) -> Finding:
    message = [
        "worker %(pid)d: %(state)s in %(where)s, %(threads)d threads, %(ticks)d ticks of CPU" % item for item in samples
    ]
    evidence = ["%d forked workers of process %d, watched for %.1f s" % (len(samples), pid, SAMPLE_S), *message[:8]]
    asleep = [  # the queue process of datasets always sleeps, but has several threads; a stuck worker has one
        item
        for item in samples
        if re.search(r"futex|^[0?]$", item["where"]) and not item["ticks"] and item["threads"] < 2
    ]  # 0 and ?: the kernel does not say where the worker sleeps
    if sum(item["ticks"] for item in samples) > IDLE_TICKS:
        if asleep:
            return unknown(
                *evidence,
                "some workers use the CPU, and %d sleep, perhaps on a lock" % len(asleep),
                advice="run this check again in a minute",
            )
        spinning = [
            item["pid"] for item in samples if item["ticks"] and item["threads"] == 1 and _may_spin(item["pid"])
        ]
        if spinning:
            return unknown(
                *evidence,
                "the map is slow or frozen: OMP_WAIT_POLICY or GOMP_SPINCOUNT makes a stuck worker spin",
                advice="run gdb -p %d -batch -ex bt a few times: gomp_team_barrier_wait_end each time means frozen"
                % spinning[0],
            )
        return clear(*evidence, "some workers use the CPU: the map is slow, not frozen")
    if any(item["state"] == "D" for item in samples):
        return unknown(
            *evidence, "some workers wait for a disk", advice="check the storage first: kb show storage-too-slow"
        )
    stuck = [item["pid"] for item in samples if "futex" in item["where"]]
    if len(stuck) == len(samples):
        return exposed(
            *evidence,
            "all workers sleep on a lock and use almost no CPU",
            advice="run gdb -p %d -batch -ex bt: gomp_team_barrier_wait_end in the only thread confirms it" % stuck[0],
        )
    return unknown(
        *evidence,
        "the workers are idle, but not all wait for a lock: the pool may have no work",
        advice="run py-spy dump --pid %d" % pid,
    )


def _forks_of(pid: int) -> list[int]:
    """Returns the children with the same command line as the process, which were forked without exec."""
    command = Path("/proc/%d/cmdline" % pid).read_bytes()
    result = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[1]) == pid and status.with_name("cmdline").read_bytes() == command:
                result.append(int(status.parent.name))
        except (OSError, IndexError):
            continue  # the process has just ended
    return sorted(result)


def _may_spin(pid: int) -> bool:
    """Whether the environment of the process tells libgomp to wait without sleeping."""
    try:
        variables = Path("/proc/%d/environ" % pid).read_bytes().upper().split(b"\0")
    except OSError:
        return False
    return any(variable.startswith((b"OMP_WAIT_POLICY=ACTIVE", b"GOMP_SPINCOUNT=")) for variable in variables)


def _ticks(pid: int) -> int:
    try:
        fields = Path("/proc/%d/stat" % pid).read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _sample(pid: int, ticks_before: int) -> dict[str, Any]:
    process = Path("/proc/%d" % pid)
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        where = (process / "wchan").read_text() or "?"
        threads = sum(1 for _ in (process / "task").iterdir())
    except OSError:
        state, where, threads = "?", "?", 0
    return {"pid": pid, "state": state, "where": where, "threads": threads, "ticks": _ticks(pid) - ticks_before}


def variant(
    name: str,
    control: Callable[..., None],
    treatment: Callable[..., None],
    because: str,
    fix: str,
    pattern: str = r"2 workers returned nothing and have used \d+ ticks of CPU",
    env: Mapping[str, str] = MappingProxyType({}),
    packages: Mapping[str, str] = MappingProxyType({"torch": ">=2.1"}),
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(control, expect=symptom(pattern), because=because, fidelity="cpu", env=env),
        treatment=Arm(treatment, expect=completed(), because=fix, fidelity="cpu", env=env),
        world_size=1,
        needs=Needs(packages=packages),
        expected_s=(3.2, 0.5),
    )


probe = Probe(
    check=check,
    params={"pid": Param("int", "process id of the script whose map or filter seems frozen")},
    experiments=(
        Experiment(
            name="openmp",
            control=Arm(
                partial(preprocess, measured=False),
                expect=hung(r"preprocess_num_proc_hang\.py\", line \d+ in featurize\n.*\bin mapstar\b"),
                because="the workers wait for OpenMP threads of the parent, which a fork does not copy",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(preprocess, measured=False, alone=True),
                expect=completed(),
                because="each worker sets torch to one thread first",
                fidelity="cpu",
            ),
            world_size=1,
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=10,
            expected_s=(5.2, 0.2),
        ),
    ),
    variants=(
        variant(
            "fresh-parent",
            partial(preprocess),
            partial(preprocess, parent_has_worked=False),
            "the parent has run a torch operation on two threads before the fork",
            "the parent has run no torch operation before the fork",
        ),
        variant(
            "one-thread-parent",
            partial(preprocess),
            partial(preprocess, parent_threads=1),
            "the parent has two OpenMP threads",
            "the parent has one OpenMP thread, as with OMP_NUM_THREADS=1, which torchrun sets",
        ),
        variant(
            "tokenizers-parallelism",
            partial(preprocess),
            partial(preprocess, alone=True),
            "TOKENIZERS_PARALLELISM=false does not affect the threads of OpenMP",
            "each worker sets torch to one thread first",
            env={"TOKENIZERS_PARALLELISM": "false"},
        ),
        variant(
            "lock",
            partial(preprocess_with_lock, method="fork"),
            partial(preprocess_with_lock, method="spawn"),
            "a thread of the parent holds a lock during the fork, so the copy in the workers stays locked",
            "the workers are spawned, and each has its own lock",
            packages={},
        ),
    ),
)
