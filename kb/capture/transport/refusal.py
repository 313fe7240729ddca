"""Explains why a node did not answer, in a sentence with the remedy."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kb.capture.transport.connection import Connection
from kb.capture.transport.exchange import NOT_RETURNED, Reply

LONGEST = 200
AFTERTHOUGHT = re.compile(
    r"^(command terminated with|srun: error: \S+: task|srun: Terminating|srun: launch/|Defaulted container)|^\s*$"
)
REMEDIES: Sequence[tuple[re.Pattern[str], str]] = tuple(
    (re.compile(pattern), remedy)
    for pattern, remedy in (
        (r"Host key verification failed", "connect to it once by hand, to accept its key"),
        (r"Permission denied \(", "`ssh -o BatchMode=yes {name} true` must work: a key in ssh-agent or on the node"),
        (r"Could not resolve hostname", "check the name"),
        (
            r"timed out|No route to host|Connection refused|Connection reset|Connection closed|onnection to .* closed",
            "the node may be down: that is evidence, look at its console",
        ),
        (
            r"python3: (command )?not found|python3: No such file|\"python3\": executable file not found"
            r"|python3: Unknown command|execve\(\): python3",
            "kb needs a python3 on the PATH there, 3.8 or newer",
        ),
        (r"python3 is 3\.", "put a newer python3 first on the PATH there"),
        (r"Invalid job id|Job/step already completing", "the job has ended"),
        (r"Access/permission denied|Invalid account|User not found", "run kb as the owner of the job, or as root"),
        (r"[Ff]orbidden", "kubectl needs the right to create `pods/exec`"),
        (r"step creation temporarily disabled|nodes are busy", "a step of the job is exclusive: `ssh:` may work"),
    )
)


def reason(connection: Connection, reply: Reply) -> str:
    """The reason, such as `Connection refused: the node may be down ...`."""
    lines = [line.strip() for line in reply.errors.splitlines() if not AFTERTHOUGHT.search(line)]
    last = lines[-1][:LONGEST] if lines else ""
    if reply.code is None:
        waited = NOT_RETURNED.format(reply.seconds)
        return f"it {waited}{f' ({last})' if last else ''}: the node may hang, that is evidence"
    last = last or (f"exit code {reply.code}" if reply.code else "it returned nothing that kb can read")
    for pattern, remedy in REMEDIES:
        if pattern.search(reply.errors):
            return f"{last}: {remedy.format(name=connection.name)}"
    return last
