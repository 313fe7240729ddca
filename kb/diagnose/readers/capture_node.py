"""What a capture says about nodes: no answer, missing ranks, silent peers, full file systems, tools that hang."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from kb.diagnose.evidence import DERIVED_PREFIX, LONGEST_EVIDENCE, Line
from kb.diagnose.readers.capture_record import Process
from kb.diagnose.readers.structured import as_integer, as_text
from kb.harness.collective import name_ranks

Nodes = Sequence[tuple[str, dict[str, Any]]]  # the records, each with its source

MOST_RANKS = 100_000
MOST_NAMED = 8  # nodes
FULL = 0.99  # used share of a file system
SILENT_S = 5.0  # a peer that sent something more recently is not silent
LAST_RECEIVED = re.compile(r"\blastrcv:(\d{1,12})")
PID = re.compile(r"\bpid=(\d{1,10})")
PORT = re.compile(r":(\d{1,5}) users:")
TOOLS = {"gpus": "nvidia-smi", "gpu-report": "nvidia-smi", "ras": "ncclras", "sockets": "ss", "kernel": "dmesg"}


def node_sentences(nodes: Nodes, processes: Sequence[Process]) -> Iterator[Line]:
    """The sentences about all nodes together, then those about each node, in the order of the records."""
    is_alone = len(nodes) == 1
    if nodes and not is_alone:
        for sentence in _over_nodes(nodes):
            yield Line(nodes[0][0], 0, f"{DERIVED_PREFIX}{sentence}"[:LONGEST_EVIDENCE])
    for source, document in nodes:
        where = "" if is_alone else f" on {as_text(document.get('node'), 20)}"
        here = [process for process in processes if process.node == document.get("node")]
        for sentence in (
            *_missing(document, is_alone=is_alone),
            *_silent(document, here),
            *_memory(here),
            *(f"{text}{where}" for text in (*_systems(document), *_silent_tools(document))),
        ):
            yield Line(source, 0, f"{DERIVED_PREFIX}{sentence}"[:LONGEST_EVIDENCE])


def _over_nodes(nodes: Nodes) -> Iterator[str]:
    """A sentence about nodes that did not answer and their ranks; else about ranks that are on none of the nodes."""
    worlds = [as_integer(_object(document.get("job")).get("world_size")) for _, document in nodes]
    ranks = [rank for _, document in nodes for rank in _ranks(document)]
    known = {rank for rank in ranks if rank is not None}
    world = max((size for size in worlds if size is not None), default=0)
    is_one_bundle = len({as_text(document.get("node"), 20) for _, document in nodes}) == len(nodes)
    is_known = is_one_bundle and len(known) == len(ranks) and 0 < len(known) < world <= MOST_RANKS
    missing = sorted(set(range(world)) - known) if is_known else []
    silent = [as_text(document.get("node"), 20) for _, document in nodes if document.get("reason")]
    named = f"{name_ranks(missing)} of {world}" if missing else "its ranks" if len(silent) == 1 else "their ranks"
    if silent:
        names = ", ".join(silent[:MOST_NAMED]) + (" and others" if len(silent) > MOST_NAMED else "")
        yield f"{names} did not answer: {named} {'was' if len(missing) == 1 else 'were'} not looked at"
    elif missing:
        verb = "has" if len(missing) == 1 else "have"
        yield f"{named} {verb} no process on any of the {len(nodes)} nodes"


def _ranks(document: dict[str, Any]) -> list[int | None]:
    ranks = document.get("ranks")
    return [as_integer(_object(rank).get("rank")) for rank in ranks] if isinstance(ranks, list) else []


def _missing(document: dict[str, Any], *, is_alone: bool) -> Iterator[str]:
    """A sentence about the ranks that this node lacks: which ones, or how many if their numbers are not known."""
    job = _object(document.get("job"))
    present = _ranks(document)
    size, world = as_integer(job.get("local_size")), as_integer(job.get("world_size"))
    known = {rank for rank in present if rank is not None}
    if size is None or size <= len(present) or len(known) < len(present) or size > MOST_RANKS:
        return
    if not is_alone and (size == world or not present):  # `_over_nodes` reports these, or the size is not this node's
        return
    launcher = _object(document.get("launcher"))
    alive = ", its launcher is alive" if launcher.get("pid") and any(launcher.get("samples") or ()) else ""
    missing = sorted(set(range(world)) - known) if world == size else []
    if missing:
        verb = "has" if len(missing) == 1 else "have"
        yield f"{name_ranks(missing)} of {world} {verb} no process on this node{alive}"
    else:
        here = "this node" if is_alone else as_text(document.get("node"), 20)
        yield f"{size - len(present)} of the {size} ranks of {here} have no process{alive}"


def _silent(document: dict[str, Any], processes: Sequence[Process]) -> Iterator[str]:
    """How long ago the ranks heard from a peer. The store sends only replies, so its connection is left out."""
    port = as_text(_object(document.get("job")).get("address")).rpartition(":")[2]
    heard: dict[int, float] = {}
    sockets = _object(document.get("tools")).get("sockets")
    lines = sockets.splitlines() if isinstance(sockets, str) else []
    for line, details in pairwise(lines):
        last = LAST_RECEIVED.search(details)
        if not line.startswith("ESTAB") or last is None or (port and f":{port} " in line):
            continue
        for pid in map(int, PID.findall(line)):
            heard[pid] = min(heard.get(pid, 1e9), int(last[1]) / 1000)
    silent = [process for process in processes if heard.get(process.pid, 0) >= SILENT_S and process.rank is not None]
    if silent and len(silent) == len(processes):
        shortest = min(heard[process.pid] for process in silent)
        verb = "has" if len(silent) == 1 else "have"
        names = name_ranks([process.rank for process in silent if process.rank is not None])
        yield f"{names} {verb} heard nothing from their peers for {shortest:.0f} s"


def _memory(processes: Sequence[Process]) -> Iterator[str]:
    """How many processes the kernel killed for lack of memory in the cgroup of the ranks, since it was created."""
    killed = [process for process in processes if process.oom_kills and process.rank is not None]
    if killed:
        count = max(process.oom_kills for process in killed)
        names = name_ranks([process.rank for process in killed if process.rank is not None])
        yield f"the cgroup of {names} counts {count} oom_kill"


def _systems(document: dict[str, Any]) -> Iterator[str]:
    systems = document.get("file_systems") if isinstance(document.get("file_systems"), list) else []
    for system in map(_object, systems or ()):
        size, free = as_integer(system.get("bytes")) or 0, as_integer(system.get("free"))
        inodes, free_inodes = as_integer(system.get("inodes")) or 0, as_integer(system.get("free_inodes"))
        folder = as_text(system.get("folder"), 80)
        if size and free is not None and free < (1 - FULL) * size:
            yield f"{folder} is full: {free >> 20:,} MiB of {size >> 20:,} are free"
        elif inodes and free_inodes is not None and free_inodes < (1 - FULL) * inodes:
            yield f"{folder} has no inodes left"


def _silent_tools(document: dict[str, Any]) -> Iterator[str]:
    """Sentences about tools and file systems that did not return in time, which is evidence."""
    steps = document.get("steps") if isinstance(document.get("steps"), list) else []
    for step in map(_object, steps or ()):
        name, error = as_text(step.get("step")), as_text(step.get("error"))
        if "did not return" not in error or as_text(step.get("where")) != "node":
            continue
        seconds = step.get("seconds")
        time = f" in {seconds:.0f} s" if isinstance(seconds, (int, float)) else ""
        kind, _, folder = name.partition(" ")
        if kind == "file-system":
            yield f"the file system of {folder} did not answer{time}"
        elif name in TOOLS:
            yield f"{TOOLS[name]} did not answer{time}"


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
