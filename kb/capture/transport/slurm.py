"""The nodes of `slurm:JOBID`, or of `slurm` inside an allocation, by an overlapping step of one task on each node."""

from __future__ import annotations

import os
import re

from kb.capture.transport.connection import AGENT, Connection
from kb.capture.transport.tools import output_of
from kb.errors import UsageError

JOB_ID = re.compile(r"\d{1,10}(_\d{1,7})?(\+\d{1,4})?")  # `_` for an array, `+` for a heterogeneous job
KEPT = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")
SRUN = ("srun", "--overlap", "--quiet", "--mpi=none", "--nodes=1", "--ntasks=1")


def connections(job: str) -> tuple[str, list[Connection]]:
    """The plain id of the job, which a part of an array has too, and a connection per node of the job.

    If `job` is empty, it is the job of this allocation. Raises `UsageError` unless the job is running.
    """
    job = job or os.environ.get("SLURM_JOB_ID", "")
    if not JOB_ID.fullmatch(job):
        raise UsageError(
            f"{job!r} is no id of a Slurm job" if job else "this is not inside of an allocation of Slurm",
            "--nodes slurm:JOBID; `squeue --me` lists your jobs",
        )
    environment = own_environment()
    lines = output_of(("squeue", "--noheader", f"--jobs={job}", "--format=%T %A %N"), environment).splitlines()
    running = [line.split()[1:] for line in lines if line.split()[:1] == ["RUNNING"]]
    if not running:
        states = ", ".join(sorted({line.split()[0] for line in lines if line.strip()}))
        raise UsageError(f"Slurm job {job} is {states or 'gone'}, not running", "`squeue --me` lists your jobs")
    if len(running) > 1:
        raise UsageError(f"Slurm job {job} has {len(running)} parts", "name one: slurm:JOBID_TASK or slurm:JOBID+PART")
    plain, nodes = running[0]
    hosts = output_of(("scontrol", "show", "hostnames", nodes), environment).split()
    return plain, [
        Connection(
            host,
            (*SRUN, f"--jobid={job}", f"--nodelist={host}", *AGENT),
            "`kb capture` as root on that node",
            environment,
        )
        for host in hosts
    ]


def own_environment() -> dict[str, str]:
    """The environment without the variables of an allocation, since srun takes them as options."""
    return {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in KEPT}
