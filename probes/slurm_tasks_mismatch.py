"""A program reads its rank and world size from Slurm's variables, but the job started another number of processes."""

from __future__ import annotations

import os
import re
import shlex
import socket
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Expect,
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

SRUN = "Slurm; the probe sets the variables of an allocation and starts the tasks itself"
TIMEOUT_S = 3


def train(ctx: Context, *, by_srun: bool = True, inherited: bool = True, processes: int = 2) -> None:
    """Joins a process group by Slurm's variables, as Lightning, mmengine and many scripts do.

    Without `by_srun`, only one process starts, with the variables of task 0, as in a batch script of two tasks. Without
    `inherited`, the variables are removed.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    os.environ.update(SLURM_NTASKS="2", SLURM_PROCID=str(ctx.rank))
    if not inherited:
        del os.environ["SLURM_NTASKS"], os.environ["SLURM_PROCID"]
    rank, world_size = int(os.environ.get("SLURM_PROCID", "0")), int(os.environ.get("SLURM_NTASKS", "1"))
    port = Path(ctx.path("port"))
    options: Dict[str, Any] = {}
    if rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port.write_text(str(listener.getsockname()[1]))
        options = {"master_listen_fd": listener.detach(), "use_libuv": False}  # older libuv stores accept no socket
    ctx.reached()
    if by_srun or ctx.rank == 0:  # without srun, nothing starts the other task
        timeout = timedelta(seconds=TIMEOUT_S)
        address = ("127.0.0.1", int(port.read_text()))
        store = dist.TCPStore(*address, world_size, is_master=rank == 0, timeout=timeout, **options)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == processes, count
    ctx.meet("trained")


def launch_per_task(ctx: Context, *, tasks_per_node: int) -> None:
    """Runs torchrun in each task of a node, with the port of the batch script; it forks its workers."""
    from torch.distributed import run

    script, port = Path(ctx.path("train.py")), Path(ctx.path("port"))
    if ctx.rank == 0:
        note = "open('trained-' + os.environ['RANK'], 'w').write(os.environ['WORLD_SIZE'])"
        script.write_text("import os, time\ntime.sleep(3)\n" + note)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port.write_text(str(free.getsockname()[1]))
    ctx.reached()
    if ctx.rank >= tasks_per_node:
        return
    command = ["--nnodes=1", "--nproc-per-node=2", "--local-addr=localhost", "--monitor-interval=0.1", "--run-path"]
    command += ["--start-method=fork", "--master-addr=127.0.0.1", "--master-port=" + port.read_text(), str(script)]
    try:
        run.main(command)
    except RuntimeError as error:
        raise Symptom("torchrun of task %d: %s" % (ctx.rank, error)) from error
    trained = {path.name: path.read_text() for path in script.parent.glob("trained-*")}
    assert trained == {"trained-0": "2", "trained-1": "2"}, trained


def launch_lightning(ctx: Context, *, devices: int = 2, per_node: Optional[str] = "2") -> None:
    """Launches Lightning's Fabric in two tasks of one node, as srun starts them."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    os.environ.update(SLURM_NTASKS="2", SLURM_NNODES="1", SLURM_JOB_NAME="train", SLURM_NODEID="0")
    os.environ.update(SLURM_PROCID=str(ctx.rank), SLURM_LOCALID=str(ctx.rank), MASTER_ADDR="127.0.0.1")
    if per_node:
        os.environ["SLURM_NTASKS_PER_NODE"] = per_node
    port = Path(ctx.path("port"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port.write_text(str(free.getsockname()[1]))
    ctx.reached()
    os.environ["MASTER_PORT"] = port.read_text()
    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp")
    fabric.launch()
    assert (fabric.global_rank, fabric.world_size) == (ctx.rank, 2), (fabric.global_rank, fabric.world_size)
    ctx.meet("launched")


# --- the check ------------------------------------------------------------------------------------------------------

LAUNCHER = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate +launch)\b")
START = re.compile(r"\bpython[\d.]*\b|" + LAUNCHER.pattern)
NO_START = re.compile(r"#|(module|conda|source|export|echo|pip) ")
ASSIGNMENT = re.compile(r"(export +|local +|readonly +)?\w+\+?=(['\"`]|\$\()")  # the variable may hold the command
OTHER_STARTERS = re.compile(r"\b(mpirun|mpiexec|prun|jsrun|pdsh|clush|ssh|parallel|xargs|deepspeed|ray)\b")
# an option or a variable that sets the number of tasks, and that this check does not count
INDIRECT = re.compile(r"--(ntasks-per-(gpu|socket|core)|multi-prog|het-group)\b|\b(SLURM|SBATCH)_N[A-Z_]+=|\bset -- ")
EXPANDED = re.compile(r"[$`](?!\{?SLURM_\w+\}?$)")  # the shell expands this word of srun, so it may hold any option
UNREADABLE = -1
SHELL_STEPS = (None, "4294967290", "-6")  # SLURM_STEP_ID of a batch script, and of the shell of salloc
NAMES = {"-N": "nodes", "-n": "ntasks", "--nodes": "nodes", "--ntasks": "ntasks", "--ntasks-per-node": "per_node"}


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the tasks that a batch script requests with those that it starts, or looks at this shell."""
    if params["script"] is None:
        return judge_shell(os.environ)
    try:
        return judge_script(params["script"].read_text(errors="replace"))
    except OSError as error:
        return unknown("kb cannot read %s: %s" % (params["script"], error.strerror))


def judge_shell(variables: Mapping[str, str]) -> Finding:
    tasks, per_node = (number(variables.get(name, "")) for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
    if tasks is None:
        advice = "run --set script=job.sh, or run this where the job starts"
        return unknown("SLURM_NTASKS is not set to a number in this shell", advice=advice)
    evidence = "SLURM_NTASKS=%s, SLURM_NTASKS_PER_NODE=%s" % (tasks, per_node)
    in_shell = variables.get("SLURM_STEP_ID") in SHELL_STEPS
    if tasks > 1 and in_shell:
        why = (
            "a program that this shell starts without srun is one process, but may believe that it is one of %s" % tasks
        )
        advice = "put srun in front of the command, or for one process run ( unset ${!SLURM_@}; ... )"
        return exposed(evidence, why, advice=advice)
    if tasks < (per_node or 0) and in_shell:  # a step may well have fewer tasks
        return exposed(evidence, "--ntasks contradicts --ntasks-per-node", advice="remove --ntasks")
    why = "kb cannot see how many processes the program expects"
    return unknown(evidence, why, advice="run --set script=job.sh")


def judge_script(text: str) -> Finding:
    """Judges a batch script that starts the training in one line; any other script is `unknown`."""
    raw = text.replace("\\\n", " ").splitlines()
    lines = [line.strip() for line in raw]
    words = sbatch_words(raw)
    requested = options(words)
    indirect = next((line for line in lines if INDIRECT.search(line) and not re.match("#(?!SBATCH)", line)), None)
    if not indirect and "--gpus-per-task" in text and not {"ntasks", "per_node"} & requested.keys():
        indirect = "--gpus-per-task"
    if indirect:
        return unknown("this may set the number of tasks, and kb does not read it: " + indirect[:80])
    if "hetjob" in words or UNREADABLE in requested.values():
        return unknown("the number of nodes or tasks is not a plain number")
    assignments = [line for line in lines if ASSIGNMENT.match(line) and "$(" not in line and START.search(line)]
    candidates = [line for line in lines if not NO_START.match(line)]
    commands = [line for line in candidates if not ASSIGNMENT.match(line) and START.search(line)]
    steps = [line for line in candidates if re.search(r"\bsrun\b", line)]
    if assignments or len(commands) != 1 or (steps and steps != commands) or OTHER_STARTERS.search(commands[0]):
        counts = "%d lines start python or a launcher, %d lines have srun" % (len(commands), len(steps))
        shown = [line[:80] for line in assignments]
        advice = "put srun in front of the one line that trains"
        return unknown(describe(requested), counts, *shown, advice=advice)
    return judge_srun(requested, commands[0]) if steps else judge_without_srun(requested, commands[0])


def sbatch_words(raw: List[str]) -> List[str]:
    """The words of the #SBATCH lines above the first command; Slurm ignores those below it."""
    end = next((index for index, line in enumerate(raw) if line.strip() and line.strip()[0] != "#"), len(raw))
    return [word for line in raw[:end] if line.startswith("#SBATCH") for word in split(line)[1:]]


def describe(requested: Mapping[str, int]) -> str:
    per_node = requested.get("per_node", "no number of")
    return "%s nodes, %s tasks, %s tasks per node" % (*nodes_and_tasks(requested), per_node)


def nodes_and_tasks(requested: Mapping[str, int]) -> Tuple[int, int]:
    nodes = requested.get("nodes", 1)
    return nodes, requested.get("ntasks", nodes * requested.get("per_node", 1))


def judge_without_srun(requested: Mapping[str, int], command: str) -> Finding:
    nodes, tasks = nodes_and_tasks(requested)
    if nodes > 1 or (tasks > 1 and not LAUNCHER.search(command)):
        why = "there is no srun, so one process starts, on the first node: " + command[:80]
        advice = (
            "put srun in front if the program reads Slurm's variables; else use srun and torchrun, one task per node"
        )
        return exposed(describe(requested), why, advice=advice)
    return unknown(describe(requested), "there is no srun, and one node: " + command[:80])


def judge_srun(requested: Mapping[str, int], command: str) -> Finding:
    """Compares the tasks that srun starts with those that were requested and that the command needs."""
    (nodes, tasks), evidence, launches = nodes_and_tasks(requested), describe(requested), LAUNCHER.search(command)
    first = command.index("srun")
    start = START.search(command, first)
    values = {"$SLURM_NNODES": nodes, "$SLURM_JOB_NUM_NODES": nodes}
    words = split(command[first : start.start() if start else None])
    own = options(words, values)
    if UNREADABLE in own.values() or any(EXPANDED.match(word) for word in words) or own.get("per_node", 1) != 1:
        return unknown(evidence, "kb cannot read how many tasks srun starts: " + command[:80])
    if own.get("nodes", nodes) != nodes:
        return unknown(evidence, "srun uses %d of the nodes: %s" % (own["nodes"], command[:80]))
    if "ntasks" not in own and "nodes" in own:
        return unknown(evidence, "srun has -N without -n; before Slurm 23.02.5 it starts all tasks of the job")
    count = own.get("ntasks", tasks)
    if launches and "nodes" not in requested and count > 1:
        return unknown(evidence, "kb does not know on how many nodes the tasks run: " + command[:80])
    started = "srun starts %d on %d nodes: %s" % (count, nodes, command[:80])
    if launches and count != nodes:
        advice = "use srun -N $SLURM_NNODES -n $SLURM_NNODES"
        return exposed(evidence, started, "a launcher must start once per node", advice=advice)
    if launches and "nodes" in requested:
        if not ({"ntasks", "per_node"} & requested.keys() or "ntasks" in own):
            advice = "write --ntasks-per-node=1 in the header, or -n on the srun line"
            return unknown(evidence, "sbatch would take SLURM_NTASKS of the shell that calls it", advice=advice)
        return clear(evidence, started, "options of the sbatch command line would change that")
    if tasks < nodes * requested.get("per_node", 1):
        return exposed(evidence, "--ntasks is less than nodes times --ntasks-per-node", advice="remove --ntasks")
    why = "kb cannot see whether the program reads Slurm's variables, and for how many GPUs"
    return unknown(evidence, started, why)


def number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def split(line: str) -> List[str]:
    """The words of a shell command, also if its quotes are incomplete."""
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def options(words: List[str], values: Mapping[str, int] = {}) -> Dict[str, int]:
    """The options that set nodes and tasks; `values` are variables with a known number, others are `UNREADABLE`."""
    found: Dict[str, int] = {}
    for index, word in enumerate(words):
        following = words[index + 1] if index + 1 < len(words) else ""
        name, _, value = word.partition("=") if word.startswith("--") else (word[:2], "", word[2:])
        value = (value or following).replace("{", "").replace("}", "")
        count = values.get(value, number(value))
        if name in NAMES:
            found[NAMES[name]] = UNREADABLE if count is None else count
    return found


def experiment(
    name: str,
    job: Callable[..., None],
    arms: Tuple[Mapping[str, Any], Mapping[str, Any]],
    expect: Expect,
    because: Tuple[str, str],
    packages: Mapping[str, str],
    world_size: int = 2,
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **arms[0]), expect, because[0], "stand-in", SRUN),
        treatment=Arm(partial(job, **arms[1]), completed(), because[1], "stand-in", SRUN),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=90,
        expected_s=(4.0, 1.0),
    )


WAITS = raised(r"waiting for (clients|workers)\. 1/2 (clients|workers) joined")
LIGHTNING = {"torch": ">=2.1", "lightning": ">=2.2"}
probe = Probe(
    check=check,
    params={"script": Param("path", "your batch script")},
    experiments=(
        experiment(
            "missing-task",
            train,
            ({"by_srun": False}, {"by_srun": True}),
            WAITS,
            (
                "the script runs python without srun, so one process starts, which reads SLURM_NTASKS=2",
                "srun starts both tasks",
            ),
            {"torch": ">=2.2"},  # in older releases, the host of the store does not report missing clients
        ),
    ),
    variants=(
        experiment(
            "left-over",
            partial(train, processes=1),
            ({"inherited": True}, {"inherited": False}),
            WAITS,
            (
                "one process starts in a shell inside an allocation, whose variables say two tasks",
                "the variables are removed for this command",
            ),
            {"torch": ">=2.2"},
            world_size=1,
        ),
        experiment(
            "torchrun-per-task",
            launch_per_task,
            ({"tasks_per_node": 2}, {"tasks_per_node": 1}),
            symptom(r"torchrun of task \d: .*(EADDRINUSE|(?i:address already in use))"),
            ("both tasks of a node start torchrun, with the same port", "one task per node starts torchrun"),
            {"torch": ">=2.1"},
        ),
        experiment(
            "devices",
            launch_lightning,
            ({"devices": 1}, {"devices": 2}),
            raised(r"You set `devices=1` in Lightning, but the number of tasks per node configured in SLURM"),
            (
                "the script gives Lightning one device, but Slurm has two tasks per node",
                "the script gives Lightning as many devices as Slurm has tasks per node",
            ),
            LIGHTNING,
        ),
        experiment(
            "ntasks-only",
            launch_lightning,
            ({"per_node": None}, {"per_node": "2"}),
            raised(r"You set `--ntasks=2` in your SLURM bash script, but this variable is not supported"),
            (
                "the batch script has --ntasks, but no --ntasks-per-node",
                "the batch script has --ntasks-per-node",
            ),
            LIGHTNING,
        ),
    ),
)
