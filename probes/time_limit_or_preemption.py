"""A job gets the signals with which a scheduler ends it. Does it save the work since the last checkpoint?"""

from __future__ import annotations

import inspect
import os
import re
import signal
import subprocess
import sys
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple

from kb.probe import (
    GLOO_TIMEOUT,
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

OPTIONS = "--rdzv-backend=c10d --rdzv-endpoint=localhost:0 --local-addr=localhost --nproc-per-node=1"
TORCH = Needs(packages={"torch": ">=2.2"})
LAUNCHER = re.compile(r"(^|/)(torchrun|accelerate|deepspeed|llamafactory-cli) | -m (torch\.distributed|accelerate)\.")
FOREGROUND = """set -e
trap 'touch "$STOP_FILE"' USR1
"$PYTHON" train.py
"""
BACKGROUND = """set -e
trap 'touch "$STOP_FILE"' USR1
"$PYTHON" train.py &
child=$!
while wait "$child" && status=0 || status=$?; kill -0 "$child" 2> /dev/null; do :; done
if [ -e "$STOP_FILE" ]; then exit 85; fi
exit "$status"
"""


def train() -> None:
    """What a worker runs: it takes short steps until it must stop, then saves. It needs no torch."""
    received: List[int] = []
    if "handler" in sys.argv:
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, lambda number, _: received.append(number))

    Path("started").write_text(str(os.getpid()))
    step = 0
    while step < 500 and not received and not os.path.exists(os.environ.get("STOP_FILE", "none")):
        step += 1
        time.sleep(0.02)
    Path("saved").write_text(str(step))


def signal_launcher(ctx: Context, *, words: str = "", number: int = signal.SIGTERM, option: str = "") -> None:
    """Runs `torchrun OPTION train.py WORDS` in a fork, which has imported torch, and signals it once it trains."""
    write_script()
    launcher = os.fork()
    if launcher == 0:
        launch([*OPTIONS.split(), *option.split(), "train.py", *words.split()])
    worker = 0
    try:
        worker = wait_for_start()
        ctx.reached()
        os.kill(launcher, number)
        gone = wait_for(lambda: os.waitpid(launcher, os.WNOHANG)[0] != 0, 20)
        assert gone, "torchrun did not exit: " + read("train.log")
        launcher = 0
        if not read("saved"):
            log = read("train.log")
            last = re.findall(r"\S*SignalException: .*", log)
            state = "its worker still trains" if is_running(worker) else "its worker saved no step"
            raise Symptom("torchrun has exited, %s; its log: %s" % (state, " / ".join(last) or repr(log)))
        assert 0 < int(read("saved")) < 500, read("saved")
        assert "SignalException" in read("train.log"), read(
            "train.log"
        )  # torchrun exits with 1 even if the worker has saved
    finally:
        kill(launcher, worker)


def launch(arguments: List[str]) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_DFL)  # as in a new process, because kb's process has a handler
    with open("train.log", "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        from torch.distributed.run import main

        main(arguments)
    except BaseException:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(0)


def signal_batch_shell(ctx: Context, *, script: str) -> None:
    """Sends USR1 to the batch shell and to no other process, as Slurm does with `--signal=B:USR1@300`."""
    write_script()
    environment = {**os.environ, "STOP_FILE": ctx.path("stop"), "PYTHON": sys.executable}
    shell = subprocess.Popen(["bash", "-c", script], env=environment)
    worker = 0
    try:
        worker = wait_for_start()
        ctx.reached()
        shell.send_signal(signal.SIGUSR1)
        ran = wait_for(Path("stop").exists, 2)
        if not ran or not wait_for(lambda: bool(read("saved")), 20):
            raise Symptom("2 s after USR1: trap has run: %s, worker still trains: %s" % (ran, is_running(worker)))
        assert 0 < int(read("saved")) < 500, read("saved")
        assert shell.wait(10) == 85, shell.returncode  # it reached the line that requeues the job
    finally:
        kill(worker, shell.pid if shell.poll() is None else 0)
        shell.wait(10)


def signal_wrapper(ctx: Context, *, replaced: bool) -> None:
    """Sends SIGTERM to `bash run.sh`, as Slurm does with the task of a step. Does the training process get it?"""
    write_script()
    Path("run.sh").write_text('export PYTHONUNBUFFERED=1\n%s"$PYTHON" train.py handler\n' % ("exec " * replaced))
    shell = subprocess.Popen(["bash", "run.sh"], env={**os.environ, "PYTHON": sys.executable})
    worker = 0
    try:
        worker = wait_for_start()
        ctx.reached()
        shell.send_signal(signal.SIGTERM)
        code = shell.wait(20)
        if not read("saved"):
            raise Symptom("bash ended with %d, its worker still trains: %s" % (code, is_running(worker)))
        assert 0 < int(read("saved")) < 500, read("saved")
    finally:
        kill(worker, shell.pid if shell.poll() is None else 0)
        shell.wait(10)


def stop(ctx: Context, *, together: bool) -> None:
    """One of two ranks gets SIGTERM during training. Do both ranks stop at the same step?"""
    import torch

    dist = ctx.init_process_group(timeout_s=1.5)
    received = []
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda number, _: received.append(number))

    def must_stop(device):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        wanted = bool(received) or os.path.exists(os.environ.get("STOP_FILE", "none"))
        flag = torch.tensor([float(wanted)], device=device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    ctx.reached()
    for step in range(1, 50):
        dist.all_reduce(torch.ones(4))
        if step == 5 and ctx.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        if must_stop(ctx.device) if together else received:  # type: ignore[no-untyped-call]
            part = ctx.path("rank%d.part" % ctx.rank)
            torch.save({"step": step}, part)
            os.replace(part, ctx.path("rank%d.pt" % ctx.rank))
            break
    dist.barrier()
    steps = [torch.load(ctx.path("rank%d.pt" % rank))["step"] for rank in range(2)]
    assert steps == [5, 5], steps


def signal_group(ctx: Context, *, apart: bool) -> None:
    """Sends SIGTERM to the rank's process group, as torchrun does. The rank handles it; its loader worker does not."""
    from torch.utils.data import DataLoader

    received: List[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: received.append(number))

    def own_group(worker_id):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
        os.setpgid(0, 0)

    samples: Any = range(4000)
    options: Any = {"num_workers": 1, "multiprocessing_context": "fork"}
    if apart:
        options["worker_init_fn"] = own_group
    batches: Any = iter(DataLoader(samples, batch_size=2, collate_fn=list, **options))
    next(batches)
    ctx.reached()
    processes = [os.getpid(), *(process.pid for process in batches._workers)]
    group = [process for process in processes if os.getpgid(process) == os.getpgrp()]
    subprocess.run(["kill", "-TERM", *map(str, group)], check=True)  # by another process, as torchrun is
    # torch raises in its handler of SIGCHLD; Condition.notify, in the queue of the loader, would swallow that error
    wait_for(lambda: not any(is_running(process) for process in group[1:]), 20)
    time.sleep(0.3)  # the kernel shows the end of a process a little before it sends SIGCHLD
    count = 1 + sum(1 for _ in batches)
    assert count == 2000 and received == [signal.SIGTERM], (count, received)


def write_script() -> None:
    imports = "import os, signal, sys, time\nfrom pathlib import Path\nfrom typing import List\n"
    Path("train.py").write_text("%s\n%s\ntrain()\n" % (imports, inspect.getsource(train)))


def wait_for_start() -> int:
    wait_for(lambda: bool(read("started")), 60)
    assert read("started"), "the worker did not start: " + read("train.log")
    return int(read("started"))


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        if condition():
            return True
        time.sleep(0.02)
    return False


def read(name: str) -> str:
    return Path(name).read_text() if Path(name).exists() else ""


def is_running(process: int) -> bool:
    try:
        return Path("/proc/%d/stat" % process).read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill(*processes: int) -> None:
    for process in processes:
        if process and is_running(process):
            os.kill(process, signal.SIGKILL)


def check(params: Mapping[str, Any]) -> Finding:
    """Does a rank that is running now handle SIGTERM? Reads /proc."""
    process = params["pid"]
    if not process:
        return unknown("no process was named", advice="--set pid=12345, the process id of a rank, not of torchrun")
    try:
        status, command, environment = (
            Path("/proc/%d/%s" % (process, name)).read_bytes().decode(errors="replace").replace("\0", " ")
            for name in ("status", "cmdline", "environ")
        )
    except OSError as error:
        return unknown("kb cannot read process %d: %s" % (process, error))
    masks = dict(re.findall(r"^Sig(Blk|Ign|Cgt):\s+([0-9a-fA-F]+)$", status, re.M))
    if len(masks) < 3:
        return unknown("/proc/%d/status does not say which signals it handles" % process)
    if LAUNCHER.search(command):
        return unknown("process %d is a launcher, not a rank" % process, advice="find its ranks: pgrep -P %d" % process)
    if "python" not in command or not re.search(r"(^| )(RANK|SLURM_PROCID)=", environment):
        return unknown("process %d may not be a rank: it is not Python, or has neither RANK nor SLURM_PROCID" % process)
    term = {name: int(mask, 16) >> (signal.SIGTERM - 1) & 1 for name, mask in masks.items()}
    if term["Cgt"] or term["Blk"]:
        return unknown("process %d handles or blocks SIGTERM; kb cannot tell whether it saves" % process)
    if term["Ign"]:
        return exposed("process %d ignores SIGTERM, so it will be killed when the grace period is over" % process)
    return exposed("process %d has no handler for SIGTERM, so preemption or eviction ends it at once" % process)


def experiment(
    name: str,
    arms: Tuple[Callable[[Context], None], Callable[[Context], None]],
    expect: Expect,
    because: Tuple[str, str],
    ranks: int = 1,
    needs: Needs = TORCH,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(arms[0], expect, because[0], "cpu"),
        treatment=Arm(arms[1], completed(), because[1], "cpu"),
        world_size=ranks,
        needs=needs,
        deadline_s=100,
        expected_s=(1.5, 1.5),
    )


SAVES = "torchrun passes the signal on, the handler sets a flag, and the worker saves after the step"
USR1 = partial(signal_launcher, words="handler", number=signal.SIGUSR1)

probe = Probe(
    check=check,
    params={"pid": Param("int", "the process id of a rank that is running now")},
    experiments=(
        experiment(
            "flag",
            (signal_launcher, partial(signal_launcher, words="handler")),
            symptom(r"its worker saved no step; its log: .*SignalException: Process \d+ got signal: 15$"),
            ("torchrun passes SIGTERM on, but the worker has no handler", SAVES),
        ),
    ),
    variants=(
        experiment(
            "agree",
            (partial(stop, together=False), partial(stop, together=True)),
            raised(GLOO_TIMEOUT),
            (
                "the rank that got the signal saves and leaves the loop alone",
                "all ranks stop at the same step and save",
            ),
            ranks=2,
        ),
        experiment(
            "batch-shell",
            (partial(signal_batch_shell, script=FOREGROUND), partial(signal_batch_shell, script=BACKGROUND)),
            symptom("trap has run: False, worker still trains: True"),
            (
                "bash runs the trap only when its foreground command has ended",
                "the signal interrupts `wait`, and bash runs the trap at once",
            ),
            needs=Needs(packages={}, programs=("bash",)),
        ),
        experiment(
            "wrapper",
            (partial(signal_wrapper, replaced=False), partial(signal_wrapper, replaced=True)),
            symptom("bash ended with -15, its worker still trains: True"),
            (
                "bash dies of SIGTERM without passing it on",
                "`exec` replaces bash with the training process, which gets SIGTERM",
            ),
            needs=Needs(packages={}, programs=("bash",)),
        ),
        experiment(
            "dataloader",
            (partial(signal_group, apart=False), partial(signal_group, apart=True)),
            raised(r"DataLoader worker \(pid \d+\) is killed by signal: Terminated"),
            (
                "SIGTERM ends the DataLoader worker, which is in the rank's process group",
                "the DataLoader worker is in its own process group and goes on delivering batches",
            ),
        ),
        experiment(
            "usr1",
            (USR1, partial(USR1, option="--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")),
            symptom("torchrun has exited, its worker still trains; its log: ''"),
            ("USR1 ends torchrun, which has no handler for it and does not pass it on", SAVES),
            needs=Needs(packages={"torch": ">=2.10"}),
        ),
    ),
)
