"""Two nodes should train together, but each has a group of its own, because its launcher was told of one node."""

from __future__ import annotations

import os
import re
import shlex
import socket
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    symptom,
    unknown,
)

TRAIN = """
import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler

dist.init_process_group("gloo")
ranks = torch.ones(1)
dist.all_reduce(ranks)
rank, ranks, samples = dist.get_rank(), ranks.item(), len(DistributedSampler(range(8)))
"""
# Reads what the launcher sets, without a group: accelerate starts an interpreter, which would have to import torch.
READ_VARIABLES = """
import os

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
samples = len(range(rank, 8, ranks))
"""
# Waits for the other node, because a process that leaves first would break the connections of one that still works.
WRITE_RESULT = """
import glob, os, time

with open(os.environ["KB_OUT"], "w") as out:
    out.write("rank %d of %d, %d of 8 samples" % (rank, ranks, samples))
while len(glob.glob(os.environ["KB_OUT"][:-1] + "?")) < 2:
    time.sleep(0.01)
"""
TORCHRUN = ("--local-addr=localhost", "--nproc-per-node=1", "--monitor-interval=0.1")
FORKED = ("--run-path", "--start-method=fork")  # from this process, which has imported torch
CONFIG = (
    "{compute_environment: LOCAL_MACHINE, distributed_type: MULTI_GPU, main_process_ip: 127.0.0.1, num_machines: %d,"
)
CONFIG += " num_processes: %d, machine_rank: %d, main_process_port: %s}"


def share_ports(ctx: Context) -> List[str]:
    """Returns a free port for the group that both nodes should form, and one for each node alone."""
    path = Path(ctx.path("ports"))
    if ctx.rank == 0:
        free = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
        path.write_text(" ".join(str(listener.getsockname()[1]) for listener in free))
        for listener in free:
            listener.close()
    assert ctx.meet("ports")
    return path.read_text().split()


def start(ctx: Context, script: str, launcher: Callable[[List[str]], Any], options: List[str]) -> None:
    """Runs the launcher of this node to its end, and compares its process with one of a group of both nodes."""
    path, out = Path(ctx.path("train-%d.py" % ctx.rank)), Path(ctx.path("out-%d" % ctx.rank))
    path.write_text(script + WRITE_RESULT)
    os.environ["KB_OUT"] = str(out)
    ctx.reached()
    launcher([*options, str(path)])
    compare(ctx, out.read_text())


def torchrun(ctx: Context, options: List[str]) -> None:
    start(ctx, TRAIN, import_module("torch.distributed.run").main, [*TORCHRUN, *FORKED, *options])


def meet_at(port: str, ctx: Context) -> List[str]:
    """Returns the options for this rendezvous. Both nodes have the address 127.0.0.1, so `is_host` decides."""
    return ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:" + port, "--rdzv-conf", "is_host=%d" % (ctx.rank == 0)]


def compare(ctx: Context, trained: str) -> None:
    if not re.fullmatch("rank [01] of 2, 4 of 8 samples", trained):  # c10d assigns the ranks in any order
        raise Symptom("2 nodes of one process each were meant, node %d trained as %s" % (ctx.rank, trained))
    ctx.meet("compared")


def launch(ctx: Context, *, nodes: int) -> None:
    """Starts torchrun as on one node, or with two nodes and the endpoint of the first. It ignores these variables."""
    port = share_ports(ctx)[0]
    os.environ.update(NNODES="2", NODE_RANK=str(ctx.rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torchrun(ctx, ["--nnodes=2", "--rdzv-id=job", *meet_at(port, ctx)] if nodes == 2 else ["--standalone"])


def launch_elastic(ctx: Context, *, same_id: bool) -> None:
    """Starts torchrun with a range of nodes, which is satisfied with its minimum."""
    options = meet_at(share_ports(ctx)[0], ctx)
    options[-1] += ",last_call_timeout=2"
    torchrun(ctx, ["--nnodes=1:2", "--rdzv-id=" + ("job" if same_id else "job-%d" % ctx.rank), *options])


def launch_accelerate(ctx: Context, *, machines: int) -> None:
    """Starts `accelerate launch` with the configuration of one machine, or of two."""
    accelerate = import_module("accelerate.commands.launch")
    ports = share_ports(ctx)
    port = ports[0] if machines == 2 else ports[1 + ctx.rank]
    config = Path(ctx.path("node-%d.yaml" % ctx.rank))
    config.write_text(CONFIG % (machines, machines, ctx.rank, port))
    parse = accelerate.launch_command_parser().parse_args
    start(ctx, READ_VARIABLES, lambda words: accelerate.launch_command(parse(words)), ["--config_file=%s" % config])


def spawn(ctx: Context, *, all_nodes: bool) -> None:
    """Does what a process of `mp.spawn` does on a node with one device. A port stands for each node's loopback."""
    import torch.distributed as dist

    ports = share_ports(ctx)
    os.environ.update(NNODES="2", NODE_RANK=str(ctx.rank), MASTER_ADDR="127.0.0.1", MASTER_PORT=ports[0])
    local_rank, per_node, backend = 0, 1, "gloo"
    rank, world_size, address = local_rank, per_node, "tcp://127.0.0.1:" + ports[1 + ctx.rank]
    ctx.reached()
    if all_nodes:
        rank = int(os.environ["NODE_RANK"]) * per_node + local_rank
        world_size = int(os.environ["NNODES"]) * per_node
        address = "tcp://" + os.environ["MASTER_ADDR"] + ":" + os.environ["MASTER_PORT"]
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world_size)
    compare(ctx, describe_group())


def describe_group() -> str:
    import torch
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler

    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return "rank %d of %d, %d of 8 samples" % (dist.get_rank(), ranks.item(), len(DistributedSampler(range(8))))


def launch_lightning(ctx: Context, *, num_nodes: int) -> None:
    """Runs the same script on both nodes, without another launcher."""
    from lightning.fabric import Fabric  # type: ignore[import-not-found]

    ports = share_ports(ctx)
    os.environ.pop("LOCAL_RANK", None)  # kb has set it for this probe
    os.environ.update(NODE_RANK=str(ctx.rank), MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = ports[0] if num_nodes == 2 else ports[1 + ctx.rank]
    ctx.reached()
    Fabric(accelerator="cpu", devices=1, num_nodes=num_nodes, strategy="ddp").launch()
    compare(ctx, describe_group())


def refuse(ctx: Context, *, checked: bool) -> None:
    """Each node has a group of its own; the script may check the world size before it trains."""
    import torch.distributed as dist

    address = "tcp://127.0.0.1:" + share_ports(ctx)[1 + ctx.rank]
    os.environ["EXPECTED_WORLD_SIZE"] = "2"
    ctx.reached()
    dist.init_process_group("gloo", init_method=address, rank=0, world_size=1)
    if checked:
        try:
            expected = int(os.environ["EXPECTED_WORLD_SIZE"])
            if dist.get_world_size() != expected:
                raise RuntimeError(f"{expected} processes were meant, this group has {dist.get_world_size()}")
        except RuntimeError as error:
            assert str(error) == "2 processes were meant, this group has 1"
            return
    compare(ctx, describe_group())


# --- the check: how many nodes do the launch command and accelerate's configuration name? ----------------------------

LAUNCHER = re.compile(r"(^|/)torchrun$|^torch\.distributed\.(run|launch)$|(^|/)accelerate$|^accelerate\.commands\.")
SCRIPT = re.compile(r".\.py$|^-m$|^--(module|no[-_]python)$")
PROCESSES = re.compile(r"--nproc[-_]per[-_]node[ =]\S+|--num[-_]processes[ =]\S+")
UNSEEN = re.compile(r"[$`;|@]|&&")  # may stand for other options, for instance a variable, or begin another command
ELSEWHERE = re.compile(r"PET_|\b(docker|podman|singularity|apptainer|kubectl|ssh|pdsh)\b")  # uses other variables


def check(params: Mapping[str, Any]) -> Finding:
    """Does the launch command, or accelerate's configuration, name one node for a job of several?"""
    command, nodes = params["command"], params["nodes"]
    if not command or not nodes:
        return unknown("kb does not know how many nodes the job should have, or how they are started", advice=ADVICE)
    try:
        words = shlex.split(command.replace("\\\n", " "))
    except ValueError as error:
        return unknown("kb cannot parse the command: %s" % error)
    first = next((place for place, word in enumerate(words) if LAUNCHER.search(word)), len(words))
    last = next((place for place, word in enumerate(words) if place > first and SCRIPT.search(word)), None)
    if last is None or nodes < 2:
        return unknown(
            "the job should have one node, or kb found no torchrun or accelerate launch with a script", advice=ADVICE
        )
    options = words[first + 1 : last]
    is_accelerate = "accelerate" in words[first]
    try:
        if UNSEEN.search(PROCESSES.sub("", " ".join(options))):
            raise ValueError("the command may have options that kb does not see: replace its variables by their values")
        told = nodes_of_accelerate(options, params["config"]) if is_accelerate else nodes_of_torchrun(options, command)
    except ValueError as error:
        return unknown(str(error))
    name, source = ("--num_machines", "configuration") if is_accelerate else ("--nnodes", "PET_NNODES")
    evidence = "the job should have %d nodes; %s is %s (from the command, the %s or the default)"
    evidence = evidence % (nodes, name, told, source)
    if told in ("1", "1:1"):
        advice = "put %s %d before the script" % (name, nodes)
        return exposed(evidence, ALONE_OR_WAITING[names_address(options, is_accelerate)], advice=advice)
    return unknown(evidence, "kb cannot tell what the other nodes are told, nor what the script does with it")


def names_address(options: List[str], is_accelerate: bool) -> bool:
    """Do all nodes meet at one address, so that those that the first does not expect wait there?"""
    return not is_accelerate and any(value_of(options, name) for name in ("rdzv_endpoint", "master_addr"))


def nodes_of_torchrun(options: List[str], command: str) -> str:
    found = value_of(options, "nnodes")
    if not found and ELSEWHERE.search(command):
        raise ValueError("the command does not contain --nnodes, and PET_NNODES may be set where it runs")
    return found or os.environ.get("PET_NNODES") or "1"


def nodes_of_accelerate(options: List[str], config: Optional[Path]) -> str:
    from kb.training_config import UnreadableConfig, read_config

    found = value_of(options, "num_machines")
    if found:
        return found
    if config is None:
        raise ValueError("the command does not contain --num_machines; name the configuration: --config FILE")
    try:
        kind, values = read_config(config)
    except UnreadableConfig as error:
        raise ValueError(str(error)) from None
    if kind != "accelerate" or str(values.get("distributed_type")).upper() == "DEEPSPEED":
        raise ValueError("the configuration is not accelerate's, or is one for DeepSpeed: see remote-shell-launcher")
    return str(values.get("num_machines", 1))


def value_of(options: List[str], name: str) -> str:
    """Returns the last value of an option, which may be abbreviated, with `-` or `_`, and with `=` or a space."""
    found = ""
    for place, word in enumerate(options):
        key, equals, value = word.partition("=")
        if re.match("--..", key) and name.startswith(key.lstrip("-").replace("-", "_")):
            found = value if equals else "".join(options[place + 1 : place + 2])
    return found


ALONE_OR_WAITING = {
    False: "each node forms a group of its own and waits for no other",
    True: "the first node trains alone; the others do so too, or wait for it",
}
ADVICE = "--set nodes=2 --set command='torchrun --nproc-per-node 8 train.py'; for accelerate also --config FILE"
NODES = "two machines; two launchers run on this one, with a port each in place of a loopback each"
ALONE = symptom(r"2 nodes of one process each were meant, node [01] trained as rank 0 of 1, 8 of 8 samples")


def pair(name: str, job: Callable[..., None], change: Tuple[str, Any, Any], because: str, fix: str) -> Experiment:
    keyword, before, after = change
    library = {name: ""} if name in ("accelerate", "lightning") else {}
    return Experiment(
        name=name,
        control=Arm(partial(job, **{keyword: before}), ALONE, because, "stand-in", NODES),
        treatment=Arm(partial(job, **{keyword: after}), completed(), fix, "stand-in", NODES),
        needs=Needs(packages={"torch": ">=2.1", **library}),
        deadline_s=90,
        expected_s=(2.0, 2.0),
    )


BECAUSE = (
    "each node runs torchrun as for a single node",
    "each node runs torchrun with --nnodes 2 and the endpoint of the first node",
)
probe = Probe(
    check=check,
    params={
        "nodes": Param("int", "how many nodes the job should have"),
        "command": Param("str", "the command that starts the training on a node"),
        "config": Param("path", "accelerate's YAML file"),
    },
    experiments=(pair("launcher", launch, ("nodes", 1, 2), *BECAUSE),),
    variants=(
        pair(
            "elastic",
            launch_elastic,
            ("same_id", False, True),
            "both nodes use --nnodes 1:2, but each has a rendezvous id of its own",
            "both nodes use the same rendezvous id",
        ),
        pair(
            "spawn",
            spawn,
            ("all_nodes", False, True),
            "the script computes rank and world size within one node",
            "the script computes rank and world size over all nodes",
        ),
        pair(
            "refuse",
            refuse,
            ("checked", False, True),
            "each group has one process, and the script trains without checking",
            "the script checks the world size and refuses to train",
        ),
        pair(
            "accelerate",
            launch_accelerate,
            ("machines", 1, 2),
            "num_machines is 1 in the configuration of both machines",
            "num_machines is 2 in the configuration of both machines",
        ),
        pair(
            "lightning",
            launch_lightning,
            ("num_nodes", 1, 2),
            "num_nodes is left at 1, so each node forms a group of its own",
            "num_nodes is 2",
        ),
    ),
)
