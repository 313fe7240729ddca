"""Real processes that train, save and print their last line, and then wait for a thread, a child or a queue."""

from __future__ import annotations

import atexit
import contextlib
import inspect
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Callable, List

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

LIMIT_S = 60.0  # for torch to start and to end on a busy machine
HEAD = """
import atexit, faulthandler, multiprocessing, os, signal, socket, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
mp = multiprocessing.get_context("fork")
signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # for the time when faulthandler has gone
faulthandler.register(signal.SIGUSR1, all_threads=True)
"""
mp = multiprocessing.get_context("fork")
WAITS = ("_shutdown", "_python_exit", "_exit_function", "_finalize_join", "join", "wait")


def train(way: str) -> None:
    """A script: two ranks train and save, and a thread of rank 0 samples until somebody stops it."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=os.environ.get("KB_STORE", "env://"))
    stop = threading.Event()

    def fit() -> None:
        loss = torch.ones(1)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            torch.save({"loss": loss}, "checkpoint.pt")

    def sample(stop: threading.Event) -> None:
        with open("gpu%d.csv" % dist.get_rank(), "w") as file:
            while not stop.wait(0 if way == "left" else 0.1):
                file.write("%d\n" % (torch.ones(400, 400) @ torch.ones(400, 400)).max())
            file.write("end\n")

    if way == "stopped":
        monitor = threading.Thread(target=sample, args=(stop,), daemon=True)
        monitor.start()
        try:
            fit()
        finally:
            stop.set()
            monitor.join(timeout=30)
    else:
        if dist.get_rank() == 0:
            threading.Thread(target=sample, args=(stop,), daemon=way == "left").start()
        fit()
    if way == "folklore":
        atexit.register(stop.set)
        torch.cuda.empty_cache()
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()
    print("training done", flush=True)  # noqa: T201
    if way == "folklore":
        sys.exit(0)
    if way == "hard":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def upload(way: str) -> None:
    """A script: a thread waits for a server that never answers."""
    server, stop = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), threading.Event()
    server.bind(("127.0.0.1", 0))

    def send(stop: threading.Event) -> None:
        while not stop.is_set():
            server.recv(1)

    if way.startswith("pool"):
        pool = ThreadPoolExecutor(1)
        pool.submit(send, stop)
        atexit.register(stop.set)
        pool.shutdown(wait=False, cancel_futures=True)
    else:
        monitor = threading.Thread(target=send, args=(stop,), daemon=way == "daemon")
        monitor.start()
        stop.set()
        monitor.join(timeout=0.5)
    print("training done", flush=True)  # noqa: T201


def evaluate_aside(way: str) -> None:
    """A script: a child process evaluates checkpoints until it is told to stop; or it is stuck in one.

    A daemonic child ends by SIGTERM, unless it has inherited the script's handler and keeps it.
    """
    jobs, daemonic = mp.Queue(), way.startswith("SIGTERM")
    if daemonic:
        signal.signal(signal.SIGTERM, lambda *_: None)

    def evaluate() -> None:
        if way == "SIGTERM reset":
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while (job := jobs.get()) is not None:
            time.sleep(job)

    workers = [mp.Process(target=evaluate, daemon=daemonic) for _ in range(1 if "stuck" in way else 2)]
    for worker in workers:
        worker.start()
    jobs.put(600 if "stuck" in way else 0)
    time.sleep(0.5 if daemonic else 0)  # the children are in their loop
    if "stuck" in way:
        jobs.put(b"x" * (1 << 20))  # more than the pipe holds
    if "told" in way:
        for _ in workers:
            jobs.put(None)
        if "stuck" in way:
            workers[0].join(timeout=1)
            workers[0].kill()
        for worker in workers:
            worker.join(timeout=60)
            worker.kill()
        jobs.cancel_join_thread()
    print("training done", flush=True)  # noqa: T201
    sys.exit(0)


def report(way: str) -> None:
    """A script: 1 MiB of results in a queue, more than its pipe holds. Nobody reads it, or only after the join."""
    results = mp.Queue()

    def work() -> None:
        results.put(b"x" * (1 << 20))
        results.put(None)

    if way in ("late", "read"):
        workers = [mp.Process(target=work) for _ in range(2)]
        for worker in workers:
            worker.start()
        if way == "late":
            print("training done", flush=True)  # noqa: T201
            workers[0].join()
        received = []
        for _ in workers:
            while (item := results.get(timeout=600)) is not None:
                received.append(item)
        for worker in workers:
            worker.join()
        assert [len(item) for item in received] == [1 << 20] * 2
    else:
        if way == "cancelled":
            results.cancel_join_thread()
        work()
        results.close()
    print("training done", flush=True)  # noqa: T201


def stacks(job: subprocess.Popen[bytes], errors: Path) -> str:
    """What the stacks of the process show: functions of Python that wait for others, and those of the script."""
    before = errors.stat().st_size
    job.send_signal(signal.SIGUSR1)
    time.sleep(0.7)
    frames = re.findall(r'File "(.*?)", line \d+ in (\S+)', errors.read_text()[before:])
    found = ["%s (%s)" % (name, Path(file).name) for file, name in frames if file.endswith("train.py") or name in WAITS]
    return ", ".join(dict.fromkeys(found))


def run(ctx: Context, script: Callable[[str], None], *, way: str, launcher: bool = False) -> None:
    """Start the script, as an interpreter of its own, and see whether it ends after its last line."""
    source, output, errors = ctx.dir / "train.py", ctx.dir / ("out%d" % ctx.rank), ctx.dir / ("err%d" % ctx.rank)
    if ctx.rank == 0:
        source.write_text(HEAD + "\n\n" + inspect.getsource(script) + "\n\n%s(%r)\n" % (script.__name__, way))
    command, environment = [sys.executable, str(source)], {**os.environ, "OMP_NUM_THREADS": "1"}
    if launcher:
        options = ["--nproc-per-node", "2", "--local-addr=localhost", "--master-port", "0"]
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", *options]
    else:
        url = "file://%s?rank=%d&world_size=%d" % (ctx.path("store"), ctx.rank, ctx.world_size)
        environment.update(RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size), KB_STORE=url)
    lines = 2 if launcher else 1
    ctx.reached()
    with output.open("wb") as out, errors.open("wb") as err:
        job = subprocess.Popen(command, stdout=out, stderr=err, env=environment, cwd=ctx.dir, start_new_session=True)
    try:
        wait_for(lambda: output.read_text().count("training done") >= lines or job.poll() is not None)
        assert output.read_text().count("training done") >= lines, errors.read_text()[-2000:]
        done = time.monotonic()
        wait_for(lambda: job.poll() is not None, 2)
        while job.poll() is None and time.monotonic() - done < LIMIT_S:
            seen = "torchrun" if launcher else stacks(job, errors)
            waited = time.monotonic() - done
            if waited > 10 if launcher else re.search("join|_shutdown", seen):
                raise Symptom("still running %.0f s after its last line, in %s" % (waited, seen))
            time.sleep(0.2)
        if job.poll() == -signal.SIGABRT:
            raise Symptom("aborted after its last line, in %s" % errors.read_text().strip().replace("\n", ", "))
        assert job.poll() == 0, (job.poll(), errors.read_text()[-2000:])
    finally:
        job.terminate()  # torchrun ends its workers
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    if script is train and ctx.rank == 0:
        import torch

        assert torch.load(ctx.dir / "checkpoint.pt")["loss"].item() == 2
        assert way != "stopped" or (ctx.dir / "gpu0.csv").read_text().endswith("end\n")


def wait_for(condition: Callable[[], Any], limit_s: float = LIMIT_S) -> None:
    end = time.monotonic() + limit_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)


def pair(
    name: str, script: Callable[[str], None], ways: str, frames: str, because: str, fix: str, ranks: int = 1, **how: Any
) -> Experiment:
    fails, works = ways.split(" / ")
    job = partial(run, script=script, **how)
    seen = "".join("(?=.*%s)" % re.escape(frame) for frame in frames.split(", "))
    control = Arm(partial(job, way=fails), symptom("after its last line, in " + seen), because, "cpu")
    treatment = Arm(partial(job, way=works), completed(), fix, "cpu")
    needs = Needs() if script is train else Needs(packages={})
    return Experiment(name, control, treatment, ranks, needs=needs, deadline_s=150, settle_s=30, expected_s=(6, 4))


THREAD = "_shutdown (threading.py), sample (train.py)"
STUCK = "_shutdown (threading.py), send (train.py)"
POOL = "_python_exit (thread.py), send (train.py)"
CHILD = "join (process.py), _exit_function (util.py)"
QUEUE = "_finalize_join (queues.py), _exit_function (util.py)"
LATE = "join (process.py), report (train.py)"
INHERITED = "the daemonic child has inherited a handler of SIGTERM"
STOPPED = "the script stops and joins the thread when training ends"

gloo = pair("gloo", train, "forgotten / stopped", THREAD, "the thread of rank 0 is never stopped", STOPPED, 2)
variants: List[Experiment] = [
    pair("folklore", train, "folklore / stopped", THREAD, "sys.exit, a barrier and atexit end no thread", STOPPED, 2),
    pair(
        "left",
        train,
        "left / stopped",
        "terminate called",
        "a daemon thread is inside torch when the interpreter ends",
        STOPPED,
        2,
    ),
    pair("blocked", upload, "thread / daemon", STUCK, "the thread never looks at its event", "the thread is a daemon"),
    pair(
        "pool",
        upload,
        "pool / daemon",
        POOL,
        "Python joins the pool before atexit",
        "a daemon thread does the work instead of the pool",
    ),
    pair(
        "child",
        evaluate_aside,
        "waits / told",
        CHILD,
        "the child waits for its next job",
        "the parent sends the child the end",
    ),
    pair(
        "stuck-child",
        evaluate_aside,
        "stuck / stuck told",
        CHILD,
        "the child is in a long job",
        "the parent kills the child",
    ),
    pair(
        "handler",
        evaluate_aside,
        "SIGTERM kept / SIGTERM reset",
        CHILD,
        INHERITED,
        "the child restores the default handler",
    ),
    pair(
        "queue",
        report,
        "unread / cancelled",
        QUEUE,
        "no process reads, and the pipe is full",
        "cancel_join_thread drops the rest",
    ),
    pair(
        "late",
        report,
        "late / read",
        LATE,
        "the parent joins the child, then reads",
        "the parent reads, then joins the child",
    ),
    pair(
        "torchrun",
        train,
        "forgotten / hard",
        "torchrun",
        "torchrun waits for rank 0",
        "rank 0 ends with os._exit",
        launcher=True,
    ),
]

probe = Probe(experiments=(gloo,), variants=tuple(variants))
