"""A launcher starts the other nodes by remote shell, which needs a hostfile, ssh, and the same paths on each node."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Mapping, Tuple

from kb.namespaces import own_user, tmpfs_over
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
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

TRAIN = "import os\nopen(os.environ['KB_OUT'] + os.environ['RANK'], 'a').write(os.environ['WORLD_SIZE'] + ' ')\n"
TEXT: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}


def set_up(ctx: Context, **scripts: str) -> str:
    """Creates a script and a hostfile, puts these programs first in PATH, and returns a free port for both nodes."""
    folder, port = Path(ctx.path("bin-%d" % ctx.rank)), Path(ctx.path("port"))
    folder.mkdir()
    for name, script in scripts.items():
        (folder / name).write_text("#!/bin/sh\n" + script)
        (folder / name).chmod(0o755)
    Path("train.py").write_text(TRAIN)
    Path("hosts").write_text("node-0 slots=1\nnode-1 slots=1\n")
    os.environ["PATH"] = os.pathsep.join((str(folder), os.path.dirname(sys.executable), os.environ.get("PATH", "")))
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE="1", KB_OUT=ctx.path("out-"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port.write_text(str(free.getsockname()[1]))
    ctx.meet("set up")
    return port.read_text()


def compare(ctx: Context) -> None:
    """Raises `Symptom` unless each of two ranks ran once with world size 2."""
    ctx.meet("launched", timeout_s=60)
    ranks = {path.name[4:]: path.read_text() for path in Path(ctx.path(".")).glob("out-*")}
    if ranks != {"0": "2 ", "1": "2 "}:
        text = ", ".join("rank %s ran with world size %s" % rank for rank in sorted(ranks.items()))
        raise Symptom("2 nodes of one rank each were meant, and %s" % (text or "no rank ran"))


def copy_command(ctx: Context, *, same_paths: bool, by_deepspeed: bool = False) -> None:
    """Node 0 composes the command that both nodes run; the home folder of node 1 has the same content, or is empty."""
    home, command = Path(ctx.path("home")), Path(ctx.path("command"))
    project, python = home / "project", home / "env" / "bin" / "python"
    if ctx.rank == 0:
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        project.mkdir()
        os.chdir(project)
    port = set_up(ctx, ssh="exit 0\n", pdsh='shift 5\necho "$*" > %s\n' % command)  # pdsh -S -f N -w HOSTS COMMAND
    if ctx.rank == 0 and by_deepspeed:
        from deepspeed.launcher import runner  # type: ignore[import-not-found]

        runner.main(["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", port, "train.py"])
    elif ctx.rank == 0:
        command.write_text("cd %s; RANK=%%n WORLD_SIZE=2 %s -u train.py" % (project, python))
    ctx.reached()
    if ctx.rank == 1 and not same_paths:
        own_user()
        tmpfs_over(str(home), 1)
    os.chdir("/")
    ran = subprocess.run(["bash", "-c", command.read_text().replace("%n", str(ctx.rank))], check=False, **TEXT)
    if not Path(ctx.path("out-%d" % ctx.rank)).exists():
        raise Symptom("node-%d: %s" % (ctx.rank, ran.stdout[:500] + ran.stdout[500:][-1000:]))
    compare(ctx)


def launch_deepspeed(ctx: Context, *, ssh: bool) -> None:
    """Starts DeepSpeed's launcher on both nodes with --no_ssh, or only on node 0 with ssh, which fails."""
    port = set_up(ctx, ssh="exit 255\n", pdsh="exit 1\n")
    from deepspeed.launcher import runner

    options = ["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", port]
    if not ssh:
        options += ["--no_ssh", "--node_rank", str(ctx.rank)]
    ctx.reached()
    if ctx.rank == 0 or not ssh:
        runner.main([*options, "train.py"])
    compare(ctx)


def launch_accelerate(ctx: Context, *, launcher: str) -> None:
    """Starts accelerate launch on both nodes, or only on node 0 with pdsh; its configuration names no hostfile."""
    port = set_up(ctx, pdsh="exit 1\n", ssh="exit 255\n")
    options = "--use_deepspeed --mixed_precision no --num_machines 2 --num_processes 2 --main_process_ip 127.0.0.1"
    command = [sys.executable, "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", port]
    command += ["--machine_rank", str(ctx.rank), "--deepspeed_multinode_launcher", launcher, "train.py"]
    ctx.reached()
    if ctx.rank == 0 or launcher == "standard":
        ran = subprocess.run(command, check=False, **TEXT)
        warning = re.search(r"Unable to find hostfile", ran.stdout)
        ctx.note(exit_code=ran.returncode, warned=bool(warning))
    compare(ctx)


def settings(params: Mapping[str, Any]) -> Tuple[str, int, str]:
    """Launcher, number of nodes (0 if not known) and hostfile; raises ValueError with the reason if kb cannot tell."""
    values: Dict[str, Any] = {}
    accelerate = False
    if params["config"]:
        from kb.training_config import UnreadableConfig, read_config

        try:
            kind, values = read_config(params["config"])
        except UnreadableConfig as error:
            raise ValueError(str(error)) from None
        accelerate = kind == "accelerate"
        if accelerate and str(values.get("distributed_type")).upper() != "DEEPSPEED":
            torchrun = (
                "distributed_type is %s, so accelerate runs torchrun on each node unless --use_deepspeed is given"
            )
            raise ValueError(torchrun % values.get("distributed_type"))
    deepspeed = (values.get("deepspeed_config") if accelerate else None) or {}
    nodes = params["nodes"] or (values.get("num_machines") if accelerate else 0) or 0
    if not isinstance(deepspeed, dict) or not isinstance(nodes, int):
        raise ValueError("deepspeed_config is not a mapping, or num_machines is not a number")
    hostfile = params["hostfile"] or deepspeed.get("deepspeed_hostfile") or ("None" if accelerate else "/job/hostfile")
    launcher = params["launcher"] or deepspeed.get("deepspeed_multinode_launcher") or "pdsh"
    return str(launcher), nodes, str(hostfile)


def check(params: Mapping[str, Any]) -> Finding:
    """Reads the hostfile and looks for the launcher's programs, without connecting to another host."""
    try:
        launcher, nodes, name = settings(params)
        hostfile = Path(name)
        lines = hostfile.read_text().splitlines() if hostfile.is_file() else None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        return unknown("kb cannot tell: %s" % error)
    if nodes == 1:
        return unknown("the job has one node, so the launcher starts no other; kb cannot tell whether it should")
    if launcher == "standard":
        each = "kb cannot see here whether accelerate launch runs on each node"
        return unknown("deepspeed_multinode_launcher is standard, which uses no hostfile and no ssh", each)
    if lines is None:
        evidence = "hostfile %s does not exist, so DeepSpeed's launcher uses the devices of this node only" % hostfile
        if nodes > 1:
            advice = "give the hostfile as an absolute path, or start a launcher on each node"
            return exposed(evidence, "the job has %d nodes" % nodes, advice=advice)
        return unknown(evidence, "kb does not know the number of nodes", advice="--set hostfile=... --set nodes=2")
    entries = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    bad = [line for line in entries if not re.match(r"\S+\s+slots=\d+", line)]
    hosts = [line.split()[0] for line in entries]
    evidence = "%s names %d hosts" % (hostfile, len(hosts))
    one_line_each = "write one line `HOST slots=8` for each host"
    if not hosts:
        return exposed(evidence, "DeepSpeed's launcher rejects an empty hostfile", advice=one_line_each)
    if bad or len(set(hosts)) < len(hosts):
        wrong = "it has malformed lines, or lists a host twice: %s" % [line[:80] for line in (bad or hosts)[:2]]
        return exposed(evidence, wrong, advice=one_line_each)
    if len(hosts) < max(nodes, 1):
        return exposed(evidence, "the job has %d nodes" % max(nodes, 1), advice="write one line for each node")
    if launcher == "nossh":
        return unknown(evidence, "the launcher is nossh, and kb cannot see here whether it runs on each host")
    missing = [name for name in ("pdsh", "ssh") if launcher == "pdsh" and not shutil.which(name)]
    if missing and len(hosts) > 1:
        where = "PATH here does not contain %s" % ", ".join(missing)
        if socket.gethostname().split(".")[0] != hosts[0].split(".")[0]:
            here = "only the node that launches needs it, and kb does not know whether this is that node"
            return unknown(evidence, where, here)
        return exposed(evidence, where, advice="install it, or start a launcher on each node")
    trial = "for each host: ssh -o BatchMode=yes HOST 'cd %s && %s -c 0'" % (os.getcwd(), sys.executable)
    untried = "kb did not try whether the hosts accept ssh and have the same paths"
    return unknown(evidence, untried, advice=trial)


SHELL = "ssh and the second machine; here a shell in another mount namespace, whose home folder is empty"
NODES = "two machines; here two processes on this one, each with its folder and one device of the CPU accelerator"


def pair(
    name: str,
    job: Callable[..., None],
    change: Mapping[str, Any],
    expect: Expect,
    because: str,
    fix: str,
    packages: Mapping[str, str],
    **common: Any,
) -> Experiment:
    """`change` holds the keyword that differs and its values in both arms; `common` holds the other keywords."""
    (key, (before, after)), stands_for = next(iter(change.items())), SHELL if job is copy_command else NODES
    return Experiment(
        name=name,
        control=Arm(partial(job, **common, **{key: before}), expect, because, "stand-in", stands_for),
        treatment=Arm(partial(job, **common, **{key: after}), completed(), fix, "stand-in", stands_for),
        needs=Needs(packages=dict(packages), programs=("bash",)),
        deadline_s=90,
        expected_s=(5.0, 5.0) if packages else (0.3, 0.3),
    )


DEEPSPEED = {"torch": ">=2.1", "deepspeed": ">=0.14.5"}
ELSEWHERE = r"node-1: bash: line \d+: cd: \S+/project: No such file or directory"

probe = Probe(
    params={
        "hostfile": Param("path", "the hostfile (default: that of the config, otherwise /job/hostfile)"),
        "nodes": Param("int", "number of nodes of the job (default: num_machines of the config)"),
        "launcher": Param("str", "pdsh, standard, nossh, openmpi, ... (default: that of the config, otherwise pdsh)"),
        "config": Param("path", "accelerate's YAML file"),
    },
    check=check,
    experiments=(
        pair(
            "same-paths",
            copy_command,
            {"same_paths": (False, True)},
            symptom(ELSEWHERE),
            "node 1 runs the command of node 0, but has neither its working folder nor its Python",
            "node 1 has the working folder and the Python under the same paths as node 0",
            {},
        ),
    ),
    variants=(
        pair(
            "pdsh",
            copy_command,
            {"same_paths": (False, True)},
            symptom(ELSEWHERE),
            "DeepSpeed's pdsh command changes to the working folder of node 0, which node 1 does not have",
            "node 1 has the working folder under the same path as node 0",
            DEEPSPEED,
            by_deepspeed=True,
        ),
        pair(
            "no-ssh",
            launch_deepspeed,
            {"ssh": (True, False)},
            raised(r"Using hostfile at hosts but host=node-0 was not reachable via ssh"),
            "ssh to the first host of the hostfile fails",
            "the launcher is started on both nodes with --no_ssh",
            DEEPSPEED,
        ),
        pair(
            "accelerate",
            launch_accelerate,
            {"launcher": ("pdsh", "standard")},
            symptom(r"2 nodes of one rank each were meant, and rank 0 ran with world size 1 ?$"),
            "accelerate uses the pdsh launcher without a hostfile, so node 0 trains alone",
            "deepspeed_multinode_launcher is standard, so accelerate runs torchrun on each node",
            {**DEEPSPEED, "accelerate": ">=1.0"},
        ),
    ),
)
