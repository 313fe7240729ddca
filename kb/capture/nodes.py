"""From `--nodes WHERE` to a connection per node."""

from __future__ import annotations

from kb.capture import kubernetes, slurm, ssh
from kb.capture.connection import Connection
from kb.errors import UsageError

FORMS = "slurm:JOBID, ssh:host1,host2, ssh:@FILE or kubectl:SELECTOR"


def connections(where: str) -> tuple[list[Connection], list[str]]:
    """The nodes in their order, and what is known of others. Raises `UsageError` or `CaptureFailed`."""
    kind, _, rest = where.partition(":")
    if kind == "slurm":
        return slurm.connections(rest), []
    if kind == "ssh" and rest:
        return ssh.connections(rest), []
    if kind == "kubectl" and rest:
        return kubernetes.connections(rest)
    raise UsageError(f"--nodes {where!r} names no nodes", FORMS)
