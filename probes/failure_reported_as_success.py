"""Training fails, and the script or program around it ends with exit status 0: pipes, `wait`, unchecked processes."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, List

from kb.probe import Arm, Context, Experiment, Needs, Probe, Symptom, completed, symptom

FAILS, WORKS = "bash -c 'exit 42'", "bash -c 'exit 0'"  # in place of the training command
STRICT = "set -eo pipefail\n"

# torchrun, for machines whose host name does not resolve
TORCHRUN = """
torchrun() { "$PYTHON" -m torch.distributed.run --standalone --local-addr=localhost --monitor-interval=0.1 "$@"; }
"""
TEE = """
torchrun --nproc-per-node 2 train.py 2>&1 | tee train.log
echo "training finished"
"""
LOGS = """
torchrun --nproc-per-node 2 --log-dir logs --tee 3 train.py
"""

# Scripts; %s is the training command
CLEANUP = """
scratch=$(mktemp -d)
%s
rm -rf "$scratch"
"""
TRAP = """
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
%s
echo "training finished"
"""
INNER = """
bash -c "%s 2>&1 | tee train.log"
"""
INNER_STRICT = """
bash -c "set -o pipefail; %s 2>&1 | tee train.log"
"""
GUARDED = """
%s || echo "training failed"
"""
GUARDED_EXIT = """
%s || { echo "training failed"; exit 1; }
"""
NEGATED = """
if ! %s; then
    exit $?
fi
"""
FUNCTION = """
train() {
    %s
    echo "training finished"
}
train || exit 1
"""
FUNCTION_ALONE = """
train() {
    %s
    echo "training finished"
}
train
"""
START = """
pids=()
for node in 0 1 2; do
    if [ $node = 1 ]; then %s & else sleep 0.3 & fi
    pids+=($!)
done
"""
WAIT = START + "wait\n"
WAIT_LIST = START + 'wait "${pids[@]}"\n'
WAIT_EACH = START + 'status=0\nfor pid in "${pids[@]}"; do wait "$pid" || status=$?; done\nexit $status\n'
FILE = "echo '[ -f nothing ] && . nothing' > settings.sh\n"
SOURCE = "source ./settings.sh\n"
GREP = "echo one | grep two"
HEAD = "yes | head -n 1"
TRAIN = "\n%s\n"
OR_TRUE = " || true"


def wrapper(way: str, train: str) -> None:
    """A Python program that starts training."""
    command: Any = train if way == "os-system" else ["bash", "-c", train]
    if way == "unchecked":
        subprocess.run(command)
    elif way == "checked":
        subprocess.run(command, check=True)
    elif way == "os-system":
        sys.exit(os.system(command))
    elif way == "sh":
        subprocess.run(train + " 2>&1 | tee train.log", shell=True, check=True)


def pool(way: str, train: str) -> None:
    """A Python program whose children train."""
    processes = multiprocessing.get_context("fork")
    workers = [
        processes.Process(target=os.system, args=("true",)),
        processes.Process(target=start_training, args=(train,)),
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if way == "joined":
        return
    if any(worker.exitcode != 0 for worker in workers):
        sys.exit(1)


def start_training(train: str) -> None:
    subprocess.run(["bash", "-c", train], check=True)


def rank(way: str, train: str) -> None:
    """A training script that handles its own exceptions."""

    if way == "finally":
        try:
            start_training(train)
        finally:
            os._exit(0)
    else:
        start_training(train)
        os._exit(0)


def train_ranks(way: str) -> None:
    """A training script for torchrun, in which rank 1 fails and rank 0 then waits for it."""
    import torch
    import torch.distributed as dist

    def main() -> None:
        dist.init_process_group("gloo")
        loss = torch.ones(1)
        dist.all_reduce(loss)
        if dist.get_rank() == 1:
            raise ValueError("bad sample")
        dist.all_reduce(loss)

    if way == "caught":
        try:
            main()
        except Exception:
            logging.exception("training failed")
    else:
        try:
            main()
        except Exception:
            logging.exception("training failed")
            raise


def status_of(ctx: Context, command: List[str]) -> int:
    inherited = {name: value for name, value in os.environ.items() if name not in ("SHELLOPTS", "BASH_ENV")}
    environment = {**inherited, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable, "TMPDIR": str(ctx.dir)}
    with open(ctx.path("output"), "ab") as output:
        return subprocess.run(command, cwd=ctx.dir, stdout=output, stderr=output, env=environment).returncode


def run_script(ctx: Context, *, script: str) -> None:
    """Let the training command fail, then work, in a script for bash."""
    ctx.reached()
    path = Path(ctx.path("job.sh"))
    statuses = []
    for train in (FAILS, WORKS):
        path.write_text(script % train)
        statuses.append(status_of(ctx, ["bash", str(path)]))
    compare(statuses)
    assert list(Path(ctx.dir).glob("tmp.*")) == []


def run_program(ctx: Context, *, program: Callable[[str, str], None], way: str) -> None:
    """Let the training command fail, then work, in a Python program."""
    ctx.reached()
    path, statuses = Path(ctx.path("program.py")), []
    for train in (FAILS, WORKS):
        head = "import multiprocessing, os, subprocess, sys\nfrom typing import Any\n\n"
        source = inspect.getsource(start_training) + "\n\n" + inspect.getsource(program)
        path.write_text(head + source + "\n\n%s(%r, %r)\n" % (program.__name__, way, train))
        statuses.append(status_of(ctx, [sys.executable, str(path)]))
    compare(statuses)


def compare(statuses: List[int]) -> None:
    for train, status in zip((42, 0), statuses):
        if (train == 0) != (status == 0):
            raise Symptom("training ended with status %d, and what started it with status %d" % (train, status))
    assert statuses[0] in (1, 42), statuses


def run_ranks(ctx: Context, *, script: str, way: str = "raised") -> None:
    """A script for bash starts torchrun, and rank 1 raises ValueError."""
    ctx.reached()
    source = "import logging\n\n\n" + inspect.getsource(train_ranks) + "\n\ntrain_ranks(%r)\n" % way
    Path(ctx.path("train.py")).write_text(source)
    path = Path(ctx.path("job.sh"))
    path.write_text(TORCHRUN + script)
    status, printed = status_of(ctx, ["bash", str(path)]), Path(ctx.path("output")).read_text()
    assert "ValueError: bad sample" in printed, printed[-2000:]
    if status == 0:
        raise Symptom("rank 1 raised ValueError, and the exit status of the job is %d" % status)
    assert status == 1 and "training finished" not in printed, (status, printed[-2000:])
    if script == LOGS:
        logs = [log.read_text() for log in Path(ctx.path("logs")).rglob("stderr.log")]
        assert len(logs) == 2 and any("ValueError: bad sample" in log for log in logs), logs


def pair(name: str, job: Callable[..., None], fails: Any, works: Any, because: str, fix: str) -> Experiment:
    real = job is run_ranks
    seen = "training ended with status 42, and what started it with status 0"
    if real:
        seen = "exit status of the job is 0"
    elif name.startswith("strict"):
        seen = "training ended with status 0, and what started it with status (1|141)"
    needs = Needs(programs=("bash",)) if real else Needs(packages={}, programs=("bash",))
    return Experiment(
        name=name,
        control=Arm(partial(job, **fails), symptom(seen), because, "cpu"),
        treatment=Arm(partial(job, **works), completed(), fix, "cpu"),
        world_size=1,
        needs=needs,
        deadline_s=90,
        expected_s=(6, 6) if real else (0.5, 0.5),
    )


def script(name: str, fails: str, works: str, because: str, fix: str) -> Experiment:
    return pair(name, run_script, {"script": fails}, {"script": works}, because, fix)


def program(name: str, program: Callable[[str, str], None], ways: str, because: str, fix: str) -> Experiment:
    fails, works = ({"program": program, "way": way} for way in ways.split(" / "))
    return pair(name, run_program, fails, works, because, fix)


tee = pair(
    "tee",
    run_ranks,
    {"script": TEE},
    {"script": STRICT + TEE},
    "tee ends with 0",
    "set -eo pipefail makes the failure count",
)
CHECKED = "check=True raises"
variants = (
    pair(
        "logs",
        run_ranks,
        {"script": TEE},
        {"script": LOGS},
        "tee ends with 0",
        "torchrun writes the logs, without a pipe",
    ),
    pair(
        "caught",
        run_ranks,
        {"script": LOGS, "way": "caught"},
        {"script": LOGS},
        "every rank logs its exception and ends",
        "every rank raises its exception again",
    ),
    script("cleanup", CLEANUP, STRICT + TRAP, "the last command is rm", "the script stops, and a trap cleans up"),
    script(
        "inner",
        STRICT + INNER,
        STRICT + INNER_STRICT,
        "the inner shell has no pipefail",
        "the inner shell sets pipefail too",
    ),
    script(
        "guarded",
        STRICT + GUARDED,
        STRICT + GUARDED_EXIT,
        "|| handles the failure",
        "the code after || ends the script with 1",
    ),
    script(
        "negated",
        STRICT + NEGATED,
        STRICT + GUARDED_EXIT,
        "$? is the status of !, which is 0",
        "the script exits with 1",
    ),
    script(
        "function",
        STRICT + FUNCTION,
        STRICT + FUNCTION_ALONE,
        "|| turns -e off inside the function",
        "the script calls the function without ||",
    ),
    script("wait", STRICT + WAIT, STRICT + WAIT_EACH, "wait returns 0", "the script waits for each process by its id"),
    script(
        "wait-list",
        STRICT + WAIT_LIST,
        STRICT + WAIT_EACH,
        "wait returns the status of the last process",
        "the script keeps the status of any process that failed",
    ),
    script(
        "strict-source",
        FILE + STRICT + SOURCE + TRAIN,
        FILE + SOURCE + STRICT + TRAIN,
        "settings.sh ends with 1",
        "set -e comes after source",
    ),
    script(
        "strict-grep",
        STRICT + GREP + TRAIN,
        STRICT + GREP + OR_TRUE + TRAIN,
        "grep finds nothing and ends with 1",
        "|| true accepts that",
    ),
    script(
        "strict-head",
        STRICT + HEAD + TRAIN,
        STRICT + HEAD + OR_TRUE + TRAIN,
        "head closes the pipe, and yes ends with 141",
        "|| true accepts that",
    ),
    program("run", wrapper, "unchecked / checked", "run without check raises nothing", CHECKED),
    program("os-system", wrapper, "os-system / checked", "os.system returns 42 * 256, of which 8 bits count", CHECKED),
    program("sh", wrapper, "sh / checked", "check=True sees the status of tee", "the command has no pipe"),
    program("process", pool, "joined / compared", "join raises nothing", "the parent compares the exit codes"),
    program(
        "exit", rank, "finally / last", "os._exit(0) runs after a failure too", "os._exit(0) runs only after success"
    ),
)

probe = Probe(experiments=(tee,), variants=variants)
