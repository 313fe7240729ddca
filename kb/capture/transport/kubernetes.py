"""The nodes of `kubectl:SELECTOR`: the running pods with these labels; each is a node of the job.

In `NAMESPACE/SELECTOR#CONTAINER`, text before the first slash is a namespace if it has no dot, else part of a label.
"""

from __future__ import annotations

import json
import re
from typing import Any

from kb.capture.transport.connection import AGENT, Connection
from kb.capture.transport.tools import output_of
from kb.errors import CaptureFailed, UsageError

FORM = re.compile(r"(?:(?P<namespace>[a-z0-9][a-z0-9-]*)/)?(?P<selector>[^#]+)(?:#(?P<container>[a-z0-9][a-z0-9-]*))?")
MOST_NAMED = 8
GET = ("kubectl", "get", "pods", "--output=json", "--request-timeout=10s")


def connections(where: str) -> tuple[list[Connection], list[str]]:
    """A connection per running pod, and a sentence about other pods. Raises `UsageError` if no pod runs."""
    form = FORM.fullmatch(where)
    if form is None:
        raise UsageError(f"{where!r} is no selector", "kubectl:LABEL=VALUE, kubectl:NAMESPACE/LABEL=VALUE#CONTAINER")
    namespace = (f"--namespace={form['namespace']}",) if form["namespace"] else ()
    try:
        pods = json.loads(output_of((*GET, *namespace, f"--selector={form['selector']}")))["items"]
        running = [pod for pod in pods if _phase(pod) == "Running"]
        idle = [f"{pod['metadata']['name']} ({_phase(pod)})" for pod in pods if _phase(pod) in ("Pending", "Failed")]
        nodes = [_connection(pod["metadata"], form["container"]) for pod in running]
    except (ValueError, KeyError, TypeError) as error:
        raise CaptureFailed("kubectl did not list pods as JSON", str(error)) from error
    more = f" and {len(idle) - MOST_NAMED} more" if len(idle) > MOST_NAMED else ""
    problems = [f"not running: {', '.join(idle[:MOST_NAMED])}{more}"] if idle else []
    if not nodes:
        raise UsageError(
            f"no pod with {form['selector']} runs", "; ".join(problems) or "`kubectl get pods` shows labels"
        )
    return nodes, problems


def _phase(pod: Any) -> str:
    return str(pod["status"]["phase"])


def _connection(pod: Any, container: str | None) -> Connection:
    name = pod["name"]
    chosen = (f"--container={container}",) if container else ()
    return Connection(
        name,
        ("kubectl", "exec", "--stdin", f"--namespace={pod['namespace']}", name, *chosen, "--", *AGENT),
        f"`kubectl debug --profile=general --target={container or 'CONTAINER'} {name}`",
    )
