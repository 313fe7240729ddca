"""Resolves `--nodes WHERE` to a connection per node."""

from __future__ import annotations

from dataclasses import dataclass

from kb.capture.transport import kubernetes, slurm, ssh
from kb.capture.transport.connection import Connection
from kb.errors import UsageError

FORMS = "slurm:JOBID, ssh:host1,host2, ssh:@FILE or kubectl:SELECTOR"


@dataclass(frozen=True, slots=True)
class Nodes:
    """The connections to nodes, in order, sentences about other nodes, and the Slurm job of the nodes, if any."""

    connections: tuple[Connection, ...]
    problems: tuple[str, ...] = ()
    slurm_job: str = ""


def resolve(where: str) -> Nodes:
    """The nodes that `where` names. Raises `UsageError` or `CaptureFailed`."""
    kind, _, rest = where.partition(":")
    if kind == "slurm":
        job, connections = slurm.connections(rest)
        return Nodes(tuple(connections), slurm_job=job)
    if kind == "ssh" and rest:
        return Nodes(tuple(ssh.connections(rest)))
    if kind == "kubectl" and rest:
        connections, problems = kubernetes.connections(rest)
        return Nodes(tuple(connections), tuple(problems))
    raise UsageError(f"--nodes {where!r} names no nodes", FORMS)
