"""A real Slurm with two nodes on one machine: munged, slurmctld, and a slurmd in the namespaces of each node."""

from __future__ import annotations

import os
import re
import secrets
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.support.console import wait_for
from tests.support.nodes import separated_nodes
from tests.support.programs import program

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "scancel")
READY_S = 12.0
CONFIGURATION = """\
ClusterName=kb
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/controller.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=0
ReturnToService=2
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@contextmanager
def slurm_job(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """The id of a job that has these nodes allocated, and the environment for Slurm's tools. Skips without Slurm."""
    programs = {name: program(name) for name in PROGRAMS}
    with separated_nodes(folder, names) as nodes, ExitStack() as stack:
        (folder / "key").write_bytes(secrets.token_bytes(1024))
        (folder / "key").chmod(0o600)
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_configuration(folder, names))
        environment = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}  # not set by any test
        files = [f"--{name}-file={folder}/{name}" for name in ("key", "seed", "log", "pid")]

        def begin(*command: str) -> None:
            with (folder / "daemons.log").open("ab") as log:
                daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            stack.callback(daemon.wait)
            stack.callback(daemon.kill)

        begin(programs["munged"], "--foreground", "--force", f"--socket={folder}/munge", *files)
        wait_for((folder / "munge").exists, "munged", READY_S)
        begin(programs["slurmctld"], "-D", "-c")
        for name in names:
            begin(*nodes.enter(name), programs["slurmd"], "-D", "-N", name)

        jobs: list[str] = []

        def allocates() -> bool:
            command = [programs["salloc"], "--immediate=2", "--no-shell", "--overcommit", f"--nodes={len(names)}"]
            ended = subprocess.run(command, env=environment, capture_output=True, text=True)
            jobs.extend(re.findall(r"Granted job allocation (\d+)", ended.stderr))
            return ended.returncode == 0

        wait_for(allocates, "Slurm", READY_S)
        yield jobs[-1], environment


def _configuration(folder: Path, names: Sequence[str]) -> str:
    ports = []
    with ExitStack() as stack:
        for _ in range(len(names) + 1):
            free = stack.enter_context(socket.socket())
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    lines = [
        f"NodeName={name} NodeHostname={name} NodeAddr=127.0.0.1 Port={port} CPUs=1\n"
        for name, port in zip(names, ports[1:], strict=True)
    ]
    return CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=ports) + "".join(lines)
