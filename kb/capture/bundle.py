"""Makes the redacted files of a bundle from what agents returned: a record per process and node, and logs.

Data from /proc, the environment and tools is JSON with a schema, so that a diagnosis does not mistake a limit or a
variable for a line of a log. Only logs of the job, kernel lines and dumps are separate files.
"""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from kb.capture.gather import Collected
from kb.capture.skew import Skew
from kb.diagnose.inputs.bundle import NODE_SCHEMA, PROCESS_SCHEMA
from kb.diagnose.readers.safe_unpickler import load_pickle
from kb.diagnose.readers.structured import Unreadable, load_json
from kb.redaction.redactor import Redactor

STACK_HEADING = "kb capture: stacks of {}; kb reads those of process.json\n"
MOST_DUMP_VALUES = 2_000_000
TOOLS = ("sockets", "gpus", "gpu-report")
OWN_NAME = re.compile(r"node-\d+")  # kb's name of a node in the bundle; a host may have such a name too
SERVER_DUMPS = ("fr_trace_json", "dump_nccl_trace_json")


@dataclass(frozen=True, slots=True)
class File:
    """A file of the bundle. `rank` is None if it belongs to no rank."""

    name: str
    kind: str
    content: bytes
    rank: int | None = None


@dataclass
class Node:
    """What the agent of one node returned. `job` is as the agent lists it; `name` is the folder in the bundle.

    `host` is the name by which kb reached the node, empty for this machine; `reason` is why it returned nothing.
    """

    job: Mapping[str, Any]
    collected: Collected
    name: str = "node-0"
    host: str = ""
    skew: Skew | None = None
    reason: str = ""
    steps: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.steps = (self.json("steps.json") or {}).get("steps", [])

    def json(self, name: str) -> Any:
        try:
            return json.loads(self.collected.parts[name])
        except (KeyError, ValueError):
            return None

    def text(self, name: str) -> str:
        return self.collected.parts.get(name, b"").decode("utf-8", "replace")

    def errors(self, where: str) -> dict[str, str]:
        return {step["step"]: step["error"] for step in self.steps if step["where"] == where and step.get("error")}


def folder_of(rank: Mapping[str, Any]) -> str:
    """The folder of a rank, as the agent names it."""
    return f"rank-{rank['rank']}" if rank["rank"] is not None else f"pid-{rank['pid']}"


def files_of(nodes: Sequence[Node], redactor: Redactor) -> list[File]:
    """All files except the manifest, redacted; logs first, since they reveal most of the names to hide."""
    logs = [_redacted(file, redactor) for node in nodes for file in _logs(node)]
    documents = [document for node in nodes for document in (*_records(node), *_dumps(node))]
    for _, _, document in documents:  # first pass: each may reveal names that occur in the others
        redact_value(document, redactor)
    records = [_document(name, kind, redact_value(document, redactor)) for name, kind, document in documents]
    stacks = [_redacted(file, redactor) for node in nodes for file in _stack_files(node)]
    return [*records, *stacks, *logs]


def redactor_of(nodes: Sequence[Node]) -> Redactor:
    """One redactor for all nodes, so that a host has the same placeholder in all files."""
    users = set()
    with suppress(KeyError, OSError):
        users.add(getpass.getuser())
    hosts = [socket.gethostname()]
    for node in nodes:
        hosts += [node.host, (node.json("node/host.json") or {}).get("host", "")]
        hosts += [rank["environment"].get("MASTER_ADDR", "") for rank in node.job["ranks"]]
    return Redactor(users=users, hosts={host for host in hosts if any(letter.isalpha() for letter in host)})


def redact_value(value: Any, redactor: Redactor) -> Any:
    """A JSON value with its strings and those keys that are paths redacted."""
    if isinstance(value, str):
        return redactor.text(value) if len(value) > 1 and not OWN_NAME.fullmatch(value) else value
    if isinstance(value, Mapping):
        return {
            redactor.text(key) if "/" in key else key: redact_value(member, redactor) for key, member in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_value(member, redactor) for member in value]
    return value


def _redacted(file: File, redactor: Redactor) -> File:
    text = redactor.text(file.content.decode("utf-8", "replace"))
    return File(file.name, file.kind, text.encode("utf-8", "replace"), file.rank)


def _document(name: str, kind: str, document: Mapping[str, Any]) -> File:
    rank = document.get("rank")
    return File(name, kind, json.dumps(document).encode(), rank if isinstance(rank, int) else None)


def _records(node: Node) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for rank in node.job["ranks"]:
        where = folder_of(rank)
        yield f"{node.name}/{where}/process.json", "process", _process(node, rank, where)
    yield f"{node.name}/node.json", "node", _node(node)


def _process(node: Node, rank: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The record of a rank, with its child processes."""
    parts = node.json(f"{where}/memory-map.json") or {}
    return {
        "schema": PROCESS_SCHEMA,
        "rank": rank["rank"],
        "rank_from": rank["rank_from"],
        "pid": rank["pid"],
        "start": rank["start"],
        "node": node.name,
        "world_size": node.job["world_size"],
        "ranks_here": [other["rank"] for other in node.job["ranks"]],
        "environment": rank["environment"],
        "arguments": parts.get("arguments", []),
        "libraries": parts.get("libraries", []),
        "facts": node.json(f"{where}/facts.json") or {},
        **_observed(node, where),
        "windows": (node.json("node/windows.json") or {}).get(where),
        "children": [
            {"pid": child["pid"], "command": child["command"], **_observed(node, f"{where}/child-{child['pid']}")}
            for child in rank["children"]
        ],
    }


def _observed(node: Node, where: str) -> dict[str, Any]:
    """Both samples and stacks of a process; a missing one is null or empty, and `errors` says why."""
    traceback = (node.json(f"{where}/trigger-server.json") or {}).get("dump_traceback", "")
    stacks = [node.text(f"{where}/stack-{number}.txt") for number in (1, 2)]
    return {
        "samples": [node.json(f"{where}/sample-{number}.json") for number in (1, 2)],
        "stacks": stacks if any(stacks) or not traceback else ["", traceback],
        "native": node.text(f"{where}/native.txt"),
        "errors": node.errors(where),
    }


def _node(node: Node) -> dict[str, Any]:
    """The record of a node. The report of each tool is a string, so that none of its lines is taken for a log line."""
    systems = [node.json(name) for name in sorted(node.collected.parts) if name.startswith("node/file-system")]
    return {
        "schema": NODE_SCHEMA,
        "node": node.name,
        **(node.json("node/host.json") or {}),
        "reason": node.reason,
        "skew": node.skew and node.skew.to_json(),
        "seconds": round(node.collected.seconds, 2),
        "job": {key: value for key, value in node.job.items() if key not in ("ranks", "command")},
        "ranks": [{key: rank[key] for key in ("rank", "rank_from", "pid")} for rank in node.job["ranks"]],
        "launcher": {"pid": node.job.get("launcher"), **_observed(node, "launcher")},
        "memory": node.json("node/memory.json"),
        "locks": node.json("node/locks.json") or [],
        "file_systems": [system for system in systems if system],
        "network": [node.json(f"node/network-{number}.json") for number in (1, 2)],
        "tools": {name: node.text(f"node/{name}.txt") for name in TOOLS},
        "steps": node.steps,
        "problems": list(node.collected.problems),
    }


def _dumps(node: Node) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Flight-recorder dumps as JSON, since a pickle cannot be redacted as text. Damaged dumps are left out."""
    for rank in node.job["ranks"]:
        where = folder_of(rank)
        data = node.collected.parts.get(f"{where}/flight.bin", b"")
        answers = node.json(f"{where}/trigger-server.json") or {}
        texts = [answers[name].encode() for name in SERVER_DUMPS if '"entries"' in answers.get(name, "")]
        for dump in filter(None, [data, *texts]):
            with suppress(Unreadable):
                is_pickle = dump[:1] == b"\x80"
                document = load_pickle(dump, MOST_DUMP_VALUES) if is_pickle else load_json(dump, MOST_DUMP_VALUES)
                if isinstance(document, dict) and "entries" in document:
                    yield f"{node.name}/{where}/flight.json", "flight recorder", {**document, "rank": rank["rank"]}
                    break


def _logs(node: Node) -> Iterator[File]:
    for rank in node.job["ranks"]:
        for name in ("stdout", "stderr"):
            data = node.collected.parts.get(f"{folder_of(rank)}/{name}.log", b"")
            if data:
                yield File(f"{node.name}/{folder_of(rank)}/{name}.log", "log", data, rank["rank"])
    kernel = node.collected.parts.get("node/kernel.txt") or node.collected.parts.get("node/journal.txt", b"")
    if kernel:
        yield File(f"{node.name}/kernel.log", "kernel log", kernel)
    report = node.collected.parts.get("node/ras.txt", b"")
    if report:
        yield File(f"{node.name}/ras.txt", "NCCL RAS", report)


def _stack_files(node: Node) -> Iterator[File]:
    """The stacks again as text, for people."""
    for rank in node.job["ranks"]:
        where = folder_of(rank)
        names = [f"{where}/{name}.txt" for name in ("stack-1", "stack-2", "native")]
        names += [f"{where}/child-{child['pid']}/stack-2.txt" for child in rank["children"]]
        parts: Iterable[str] = filter(None, map(node.text, names))
        if text := "\n".join(parts):
            heading = STACK_HEADING.format(where)
            yield File(f"{node.name}/{where}/stacks.txt", "stacks", (heading + text).encode(), rank["rank"])
