"""A program reads its rank and world size from Slurm's variables, and another number of processes was started."""

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

SRUN = "Slurm: the job sets the variables of an allocation and starts its tasks itself"
TIMEOUT_S = 3


def train(ctx: Context, *, by_srun: bool = True, inherited: bool = True, processes: int = 2) -> None:
    """As Lightning, mmengine and many scripts do it. A batch script of two tasks has the variables of task 0."""
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
        options = {"master_listen_fd": listener.detach(), "use_libuv": False}  # older libuv stores take no socket
    ctx.reached()
    if by_srun or ctx.rank == 0:  # without srun nobody starts the other task
        timeout = timedelta(seconds=TIMEOUT_S)
        number = int(port.read_text())
        store = dist.TCPStore("127.0.0.1", number, world_size, is_master=rank == 0, timeout=timeout, **options)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timeout)
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == processes, count
    ctx.meet("trained")


def launch_per_task(ctx: Context, *, tasks_per_node: int) -> None:
    """Each task of a node runs torchrun, in this process, with the port of the batch script; it forks the workers."""
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
    """Two tasks of one node, as srun starts them."""
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


# --- the check -----------------------------------------------------------------------------------------------------

LAUNCHER = re.compile(r"\b(torchrun|torch\.distributed\.(run|launch)|accelerate +launch)\b")
START = re.compile(r"\bpython[\d.]*\b|" + LAUNCHER.pattern)
NO_START = re.compile(r"#|(module|conda|source|export|echo|pip) ")
HELD = re.compile(r"(export +|local +|readonly +)?\w+\+?=(['\"`]|\$\()")  # a variable, which may hold the command
OTHERS = re.compile(r"\b(mpirun|mpiexec|prun|jsrun|pdsh|clush|ssh|parallel|xargs|deepspeed|ray)\b")
# An option or a variable that decides how many tasks there are, and that is not counted here.
INDIRECT = re.compile(r"--(ntasks-per-(gpu|socket|core)|multi-prog|het-group)\b|\b(SLURM|SBATCH)_N[A-Z_]+=|\bset -- ")
MORE = re.compile(r"[$`](?!\{?SLURM_\w+\}?$)")  # a word of srun's options that is expanded, and may hold any option
UNREADABLE = -1
SHELL_STEPS = (None, "4294967290", "-6")  # SLURM_STEP_ID of a batch script, and of the shell of salloc, a step as well
NAMES = {"-N": "nodes", "-n": "ntasks", "--nodes": "nodes", "--ntasks": "ntasks", "--ntasks-per-node": "per_node"}


def check(params: Mapping[str, Any]) -> Finding:
    """Compare the tasks that a batch script asks for with what it starts; without one, look at this shell."""
    if params["script"] is None:
        return judge_shell(os.environ)
    try:
        return judge_script(params["script"].read_text(errors="replace"))
    except OSError as error:
        return unknown("%s cannot be read: %s" % (params["script"], error.strerror))


def judge_shell(variables: Mapping[str, str]) -> Finding:
    tasks, per_node = (number(variables.get(name, "")) for name in ("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE"))
    if tasks is None:
        return unknown("no number in SLURM_NTASKS here", advice="--set script=job.sh, or run this where the job starts")
    evidence = "SLURM_NTASKS=%s, SLURM_NTASKS_PER_NODE=%s" % (tasks, per_node)
    in_shell = variables.get("SLURM_STEP_ID") in SHELL_STEPS
    if tasks > 1 and in_shell:
        alone = "what is started here without srun is one process, and may take itself for one of %s" % tasks
        return exposed(evidence, alone, advice="srun in front; for one process only: ( unset ${!SLURM_@}; ... )")
    if tasks < (per_node or 0) and in_shell:  # a step may well have fewer
        return exposed(evidence, "--ntasks contradicts --ntasks-per-node", advice="remove --ntasks")
    return unknown(evidence, "how many processes the program expects cannot be seen", advice="--set script=job.sh")


def judge_script(text: str) -> Finding:
    raw = text.replace("\\\n", " ").splitlines()
    lines = [line.strip() for line in raw]
    end = next((place for place, line in enumerate(lines) if line and line[0] != "#"), len(lines))
    words = [
        word for line in raw[:end] if line.startswith("#SBATCH") for word in split(line)[1:]
    ]  # the rest is ignored
    asked = options(words)
    indirect = next((line for line in lines if INDIRECT.search(line) and not re.match("#(?!SBATCH)", line)), None)
    if not indirect and "--gpus-per-task" in text and not {"ntasks", "per_node"} & asked.keys():
        indirect = "--gpus-per-task"
    if indirect:
        return unknown("the number of tasks may come from elsewhere: " + indirect[:80])
    nodes = asked.get("nodes", 1)
    tasks = asked.get("ntasks", nodes * asked.get("per_node", 1))
    evidence = "%s nodes, %s tasks, %s tasks per node" % (nodes, tasks, asked.get("per_node", "no number of"))
    if "hetjob" in words or UNREADABLE in asked.values():
        return unknown("the number of nodes or tasks is not one number")
    held = [line for line in lines if HELD.match(line) and "$(" not in line and START.search(line)]
    commands = [line for line in lines if not NO_START.match(line) and not HELD.match(line) and START.search(line)]
    steps = [line for line in lines if not NO_START.match(line) and re.search(r"\bsrun\b", line)]
    if held or len(commands) != 1 or (steps and steps != commands) or OTHERS.search(commands[0]):
        what = "%d lines start python or a launcher, %d have srun" % (len(commands), len(steps))
        return unknown(
            evidence, what, *(line[:80] for line in held), advice="srun in front of the one line that trains"
        )
    command, launches = commands[0], LAUNCHER.search(commands[0])
    if not steps:
        if nodes > 1 or (tasks > 1 and not launches):
            advice = "srun in front, if the program reads Slurm's variables; else srun and torchrun, one task per node"
            return exposed(evidence, "no srun: one process, on the first node: " + command[:80], advice=advice)
        return unknown(evidence, "no srun, one node: " + command[:80])
    first = command.index("srun")
    start = START.search(command, first)
    values = {"$SLURM_NNODES": nodes, "$SLURM_JOB_NUM_NODES": nodes}
    words = split(command[first : start.start() if start else None])
    own = options(words, values)
    if UNREADABLE in own.values() or any(MORE.match(word) for word in words) or own.get("per_node", 1) != 1:
        return unknown(evidence, "how many tasks srun starts cannot be read: " + command[:80])
    if own.get("nodes", nodes) != nodes:
        return unknown(evidence, "srun takes %d of the nodes: %s" % (own["nodes"], command[:80]))
    if "ntasks" not in own and "nodes" in own:
        return unknown(evidence, "srun -N without -n: before Slurm 23.02.5 it starts all tasks of the job")
    if launches and "nodes" not in asked and own.get("ntasks", tasks) > 1:
        return unknown(evidence, "on how many nodes the tasks are is not known: " + command[:80])
    started = "srun starts %d on %d nodes: %s" % (own.get("ntasks", tasks), nodes, command[:80])
    if launches and own.get("ntasks", tasks) != nodes:
        advice = "srun -N $SLURM_NNODES -n $SLURM_NNODES --ntasks-per-node=1"
        return exposed(evidence, started, "a launcher is started once per node", advice=advice)
    if launches and "nodes" in asked:
        return clear(evidence, started, "options of the sbatch command line would change that")
    if tasks < nodes * asked.get("per_node", 1):
        return exposed(evidence, "--ntasks is less than nodes times --ntasks-per-node", advice="remove --ntasks")
    return unknown(evidence, started, "whether the program reads Slurm's variables, and for how many GPUs, is not seen")


def number(text: str) -> Optional[int]:
    return int(text) if re.fullmatch("[0-9]{1,9}", text) else None


def split(line: str) -> List[str]:
    try:
        return shlex.split(line)
    except ValueError:
        return line.split()


def options(words: List[str], values: Mapping[str, int] = {}) -> Dict[str, int]:
    """The numbers of the options that count."""
    found: Dict[str, int] = {}
    for place, word in enumerate(words):
        following = words[place + 1] if place + 1 < len(words) else ""
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
    params={"script": Param("path", "the batch script")},
    experiments=(
        experiment(
            "missing-task",
            train,
            ({"by_srun": False}, {"by_srun": True}),
            WAITS,
            ("the script runs python without srun: one process, which reads SLURM_NTASKS=2", "srun starts both tasks"),
            {"torch": ">=2.2"},  # before, the host of the store did not complain of missing clients
        ),
    ),
    variants=(
        experiment(
            "left-over",
            partial(train, processes=1),
            ({"inherited": True}, {"inherited": False}),
            WAITS,
            ("a shell inside an allocation: its variables say two tasks", "the variables are removed for this command"),
            {"torch": ">=2.2"},
            world_size=1,
        ),
        experiment(
            "torchrun-per-task",
            launch_per_task,
            ({"tasks_per_node": 2}, {"tasks_per_node": 1}),
            symptom(r"torchrun of task \d: .*(EADDRINUSE|(?i:address already in use))"),
            ("two tasks of a node start torchrun, both with the same port", "one task per node starts torchrun"),
            {"torch": ">=2.1"},
        ),
        experiment(
            "devices",
            launch_lightning,
            ({"devices": 1}, {"devices": 2}),
            raised(r"You set `devices=1` in Lightning, but the number of tasks per node configured in SLURM"),
            ("Lightning is told one device, Slurm two tasks per node", "as many devices as tasks per node"),
            LIGHTNING,
        ),
        experiment(
            "ntasks-only",
            launch_lightning,
            ({"per_node": None}, {"per_node": "2"}),
            raised(r"You set `--ntasks=2` in your SLURM bash script, but this variable is not supported"),
            ("the batch script has --ntasks and no --ntasks-per-node", "it has --ntasks-per-node"),
            LIGHTNING,
        ),
    ),
)
