"""A launcher on one node starts the others through a shell there: without hosts, ssh, or the same paths it cannot."""

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
    """A script, a hostfile, a PATH that begins with these programs, and one port for both nodes, which is returned."""
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
    """Each of two ranks ran once, and had world size 2."""
    ctx.meet("launched", timeout_s=60)
    ranks = {path.name[4:]: path.read_text() for path in Path(ctx.path(".")).glob("out-*")}
    if ranks != {"0": "2 ", "1": "2 "}:
        text = ", ".join("rank %s ran with world size %s" % rank for rank in sorted(ranks.items()))
        raise Symptom("2 nodes of one rank each were meant, and %s" % (text or "no rank ran"))


def copy_command(ctx: Context, *, same_paths: bool, by_deepspeed: bool = False) -> None:
    """Node 0 composes the command that both run; in the home folder of node 1 is the same, or nothing."""
    home, sent = Path(ctx.path("home")), Path(ctx.path("sent"))
    project, python = home / "project", home / "env" / "bin" / "python"
    if ctx.rank == 0:
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        project.mkdir()
        os.chdir(project)
    port = set_up(ctx, ssh="exit 0\n", pdsh='shift 5\necho "$*" > %s\n' % sent)  # pdsh -S -f N -w HOSTS COMMAND
    if ctx.rank == 0 and by_deepspeed:
        from deepspeed.launcher import runner  # type: ignore[import-not-found]

        runner.main(["--hostfile", "hosts", "--master_addr", "127.0.0.1", "--master_port", port, "train.py"])
    elif ctx.rank == 0:
        sent.write_text("cd %s; RANK=%%n WORLD_SIZE=2 %s -u train.py" % (project, python))
    ctx.reached()
    if ctx.rank == 1 and not same_paths:
        own_user()
        tmpfs_over(str(home), 1)
    os.chdir("/")
    ran = subprocess.run(["bash", "-c", sent.read_text().replace("%n", str(ctx.rank))], check=False, **TEXT)
    if not Path(ctx.path("out-%d" % ctx.rank)).exists():
        raise Symptom("node-%d: %s" % (ctx.rank, ran.stdout[:500] + ran.stdout[500:][-1000:]))
    compare(ctx)


def launch_deepspeed(ctx: Context, *, ssh: bool) -> None:
    """DeepSpeed's launcher on both nodes, or, where it uses ssh, on node 0 alone; ssh fails."""
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
    """accelerate launch on both nodes, or, with pdsh, on node 0 alone; there is no hostfile in its configuration."""
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
    """Launcher, number of nodes (0 if not known) and hostfile; raises ValueError with what keeps them unknown."""
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
            uses = "distributed_type is %s: accelerate runs torchrun on each node, unless it is started with "
            raise ValueError(uses % values.get("distributed_type") + "--use_deepspeed")
    deepspeed = (values.get("deepspeed_config") if accelerate else None) or {}
    nodes = params["nodes"] or (values.get("num_machines") if accelerate else 0) or 0
    if not isinstance(deepspeed, dict) or not isinstance(nodes, int):
        raise ValueError("deepspeed_config is no mapping, or num_machines is no number")
    hostfile = params["hostfile"] or deepspeed.get("deepspeed_hostfile") or ("None" if accelerate else "/job/hostfile")
    launcher = params["launcher"] or deepspeed.get("deepspeed_multinode_launcher") or "pdsh"
    return str(launcher), nodes, str(hostfile)


def check(params: Mapping[str, Any]) -> Finding:
    """Read the hostfile and look for the launcher's programs; asks no other host."""
    try:
        launcher, nodes, name = settings(params)
        hostfile = Path(name)
        lines = hostfile.read_text().splitlines() if hostfile.is_file() else None
    except (OSError, ValueError) as error:  # UnicodeDecodeError is a ValueError
        return unknown("cannot tell: %s" % error)
    if nodes == 1:
        return unknown("one node", "no other node is started; whether the job was meant to have more is not known")
    if launcher == "standard":
        each = "whether accelerate launch runs on each node cannot be seen here"
        return unknown("deepspeed_multinode_launcher is standard: no hostfile, no ssh", each)
    if lines is None:
        evidence = "there is no hostfile %s: DeepSpeed's launcher goes on with the devices of this node" % hostfile
        if nodes > 1:
            return exposed(evidence, "the job has %d nodes" % nodes, advice="an absolute path, or a launcher per node")
        return unknown(evidence, "how many nodes the job has is not known", advice="--set hostfile=... --set nodes=2")
    entries = [line.strip() for line in lines if line.strip() and not line.strip().startswith("#")]
    bad = [line for line in entries if not re.match(r"\S+\s+slots=\d+", line)]
    hosts = [line.split()[0] for line in entries]
    evidence = "%s names %d hosts" % (hostfile, len(hosts))
    if not hosts:
        return exposed(evidence, "DeepSpeed's launcher refuses an empty hostfile", advice="HOST slots=8, once each")
    if bad or len(set(hosts)) < len(hosts):
        wrong = "bad lines, or a host twice: %s" % [line[:80] for line in (bad or hosts)[:2]]
        return exposed(evidence, wrong, advice="HOST slots=8, once each")
    if len(hosts) < max(nodes, 1):
        return exposed(evidence, "the job has %d nodes" % max(nodes, 1), advice="one line for each node")
    if launcher == "nossh":
        return unknown(evidence, "nossh: whether the launcher runs on each of them cannot be seen here")
    missing = [name for name in ("pdsh", "ssh") if launcher == "pdsh" and not shutil.which(name)]
    if missing and len(hosts) > 1:
        where = "not on PATH here: %s" % ", ".join(missing)
        if socket.gethostname().split(".")[0] != hosts[0].split(".")[0]:
            return unknown(evidence, where, "only the node that launches needs it; whether this is it is not known")
        return exposed(evidence, where, advice="install it, or a launcher per node")
    trial = "for each host: ssh -o BatchMode=yes HOST 'cd %s && %s -c 0'" % (os.getcwd(), sys.executable)
    return unknown(
        evidence, "whether they let us in and have the same paths cannot be seen without trying", advice=trial
    )


SHELL = "ssh and the second machine: a shell in another mount namespace, whose home folder is empty"
NODES = "two machines: two folders and processes of this one, one device each that the CPU accelerator counts"


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
    """`change` names the keyword with its values in control and treatment; `common` has those of both."""
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
        "hostfile": Param("path", "the hostfile (default: that of the config, else /job/hostfile)"),
        "nodes": Param("int", "how many nodes the job has (default: num_machines of the config)"),
        "launcher": Param("str", "pdsh, standard, nossh, openmpi, ... (default: that of the config, else pdsh)"),
        "config": Param("path", "accelerate's YAML file"),
    },
    check=check,
    experiments=(
        pair(
            "same-paths",
            copy_command,
            {"same_paths": (False, True)},
            symptom(ELSEWHERE),
            "node 1 runs the command of node 0, and has neither its folder nor its Python",
            "both are on node 1 under the same paths",
            {},
        ),
    ),
    variants=(
        pair(
            "pdsh",
            copy_command,
            {"same_paths": (False, True)},
            symptom(ELSEWHERE),
            "DeepSpeed hands pdsh a command with the working folder of node 0, which node 1 does not have",
            "the folder is on node 1 under the same path",
            DEEPSPEED,
            by_deepspeed=True,
        ),
        pair(
            "no-ssh",
            launch_deepspeed,
            {"ssh": (True, False)},
            raised(r"Using hostfile at hosts but host=node-0 was not reachable via ssh"),
            "ssh to the first host of the hostfile fails",
            "--no_ssh, and the launcher is started on both nodes",
            DEEPSPEED,
        ),
        pair(
            "accelerate",
            launch_accelerate,
            {"launcher": ("pdsh", "standard")},
            symptom(r"2 nodes of one rank each were meant, and rank 0 ran with world size 1 ?$"),
            "accelerate takes pdsh and hands it no hostfile: node 0 trains alone",
            "standard: torchrun on each node",
            {**DEEPSPEED, "accelerate": ">=1.0"},
        ),
    ),
)
