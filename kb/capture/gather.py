"""Runs the agents on the nodes and reads their jobs and the parts of a capture, even of agents that were ended."""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from kb.capture.skew import Skew
from kb.capture.transport.connection import Connection, here
from kb.capture.transport.exchange import Reply, exchange
from kb.capture.transport.refusal import reason
from kb.errors import CaptureFailed

# Each module comes after those that it imports.
MODULES = ("steps", "processes", "ranks", "jobs", "stacks", "listing", "node", "triggers", "main")
LIST_S = 25.0  # for the list of jobs, even if some processes cannot be read
GRACE_S = 3.0  # after its own deadline, before the agent is ended
CONNECT_S = 6.0  # for a transport to reach its node
FIRST_PART = b"node/host.json\0"  # anything before it was printed by the login of the node
LOADER = """\
import json, sys, types
if sys.version_info < (3, 8):
    sys.exit("python3 is %d.%d there" % sys.version_info[:2])
package = sys.modules["kb_agent"] = types.ModuleType("kb_agent")
package.__path__ = []
for name, source in json.loads(SOURCES):
    module = types.ModuleType("kb_agent." + name)
    module.__package__ = "kb_agent"
    sys.modules[module.__name__] = module
    setattr(package, name, module)
    exec(compile(source, "kb_agent/" + name + ".py", "exec"), module.__dict__)
sys.modules["kb_agent.main"].main(json.loads(OPTIONS))
"""


@dataclass(frozen=True, slots=True)
class Listing:
    """The answer of a node about its jobs; `reason` says why there is none and is empty otherwise.

    `machine` is its system and architecture, `py_spy` the path of py-spy there; `skew` compares its clock with kb's.
    """

    connection: Connection
    seconds: float
    jobs: tuple[Mapping[str, Any], ...] = ()
    problems: tuple[str, ...] = ()
    machine: str = ""
    py_spy: str = ""
    host: str = ""
    skew: Skew | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Collected:
    """What the agent of a node returned: files by name, and sentences about what it could not do."""

    parts: Mapping[str, bytes]
    problems: tuple[str, ...]
    seconds: float


def agent_script(options: Mapping[str, Any]) -> str:
    """The agent and its options as one text for `python3 -`, which needs no installation and is not shown by `ps`."""
    folder = files("kb.capture.agent")
    sources = [(name, folder.joinpath(f"{name}.py").read_text(encoding="utf-8")) for name in MODULES]
    return f"SOURCES = {json.dumps(sources)!r}\nOPTIONS = {json.dumps(options)!r}\n{LOADER}"


def py_spy() -> str | None:
    """The path of py-spy next to kb's interpreter, where the extra `capture` installs it, else on PATH."""
    beside = os.path.join(os.path.dirname(sys.executable), "py-spy")
    return beside if os.access(beside, os.X_OK) else shutil.which("py-spy")


def machine() -> str:
    """System and architecture, in the agent's form; nodes for which they are equal can run the same programs."""
    return f"{platform.system()} {platform.machine()}"


def list_jobs(pid: int | None = None, python: str = sys.executable) -> dict[str, Any]:
    """The training jobs of this node, or only those of a process. Raises `CaptureFailed`."""
    (reply,) = _ask([here(pid, python)], [{"mode": "list", "pid": pid}], LIST_S)
    listed = _document(reply.output)
    if listed is None:
        raise CaptureFailed(
            "the processes of this node could not be listed", reason(here(), reply) or "KB_DEBUG=1 shows more"
        )
    return listed


def list_nodes(connections: Sequence[Connection], limit_s: float) -> list[Listing]:
    """The jobs of all nodes, which are asked in parallel; a node has `limit_s` once it is reached."""
    replies = _ask(connections, [{"mode": "list"}] * len(connections), min(LIST_S, limit_s))
    return [_listing(connection, reply) for connection, reply in zip(connections, replies, strict=True)]


def _listing(connection: Connection, reply: Reply) -> Listing:
    listed = _document(reply.output)
    if listed is None:
        return Listing(connection, reply.seconds, reason=reason(connection, reply))
    return Listing(
        connection,
        reply.seconds,
        tuple(listed["jobs"]),
        tuple(listed["problems"]),
        listed["machine"],
        listed["py_spy"],
        listed["host"],
        Skew.between(listed["time"], (reply.began, reply.ended)),
    )


def _document(output: bytes) -> dict[str, Any] | None:
    """The JSON in the last line, since a login may print other lines before it; None if there is none."""
    try:
        listed = json.loads(output.rpartition(b"\n")[2])
    except ValueError:
        return None
    return listed if isinstance(listed, dict) and "jobs" in listed else None


def collect(
    connections: Sequence[Connection], options: Sequence[Mapping[str, Any]], limit_s: float
) -> list[Collected | str]:
    """Capture one job on its nodes in parallel. For a node that returned nothing, the result is the reason.

    `limit_s` is how long an agent may take, not counting the connection to its node.
    """
    replies = _ask(connections, [{"mode": "collect", **each} for each in options], limit_s + GRACE_S)
    return [_collected(connection, reply) for connection, reply in zip(connections, replies, strict=True)]


def _collected(connection: Connection, reply: Reply) -> Collected | str:
    parts = dict(read_parts(reply.output[max(0, reply.output.find(FIRST_PART)) :]))
    why = reason(connection, reply)
    if not parts:
        return why
    cut = f"the capture of this node was cut off after {reply.seconds:.0f} s: {why}"
    return Collected(parts, () if "steps.json" in parts else (cut,), reply.seconds)


def _ask(connections: Sequence[Connection], options: Sequence[Mapping[str, Any]], limit_s: float) -> list[Reply]:
    def text(number: int) -> str:
        connection = connections[number]
        own = {"is_here": connection.is_here, "as_root": connection.as_root, "limit_s": limit_s}
        return agent_script({**own, **options[number]})

    return exchange(connections, text, lambda number: limit_s + (0 if connections[number].is_here else CONNECT_S))


def read_parts(data: bytes) -> Iterator[tuple[str, bytes]]:
    """The complete members of a tar that may be cut off."""
    at = 0
    while at + tarfile.BLOCKSIZE <= len(data):
        try:
            info = tarfile.TarInfo.frombuf(data[at : at + tarfile.BLOCKSIZE], "utf-8", "surrogateescape")
        except tarfile.TarError:  # the end, or a header that was cut
            return
        at += tarfile.BLOCKSIZE
        if at + info.size > len(data):
            return
        yield info.name, data[at : at + info.size]
        at += -(-info.size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
