"""Takes a capture on this node or on all nodes of a job, and packs it into the bytes of a bundle."""

from __future__ import annotations

import base64
import secrets
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kb.capture import archive, bundle, gather, plan
from kb.capture.gather import Collected, Listing
from kb.capture.jobs import Job, Part
from kb.capture.summary import NodeSummary, about_nodes, identity, offered_windows, summarize
from kb.capture.transport.connection import here
from kb.errors import CaptureFailed
from kb.installation import install_command

NO_PY_SPY = "py-spy is not installed, so there are no stacks: {}"
NO_PY_SPY_THERE = "no py-spy on {}, and none here for {}, so there are no stacks: install it there, or here: {}"
MOST_BYTES = 1 << 30  # of all nodes together
LEAST_SHARE = 4 << 20  # of one node
MOST_SHARE = 96 << 20
MOST_DELAY_S = 5.0  # before all nodes begin together
SLOWER = 1.5  # a node that takes this many times as long as for its list can still begin with the others


@dataclass(frozen=True, slots=True)
class Settings:
    """`interval_s` is between samples; `seconds` bounds the collection; `native` pauses, `trigger` asks processes."""

    interval_s: float = 3.0
    seconds: float = 30.0
    native: bool = False
    trigger: bool = False


@dataclass(frozen=True, slots=True)
class Capture:
    """The name of a bundle without its suffix, its bytes, and the problems, with their remedies."""

    name: str
    data: bytes
    seconds: float
    ranks: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]
    nodes: tuple[NodeSummary, ...] = ()


def capture(job: Mapping[str, Any], settings: Settings) -> Capture:
    """Collect on this node and pack. Raises `CaptureFailed` if nothing was returned."""
    tool = gather.py_spy() or ""
    own = Listing(here(job["id"]), 0.0, py_spy=tool)
    problems = [] if tool else [NO_PY_SPY.format(install_command("capture"))]
    return _capture(Job("", (Part(own, job),)), [], settings, problems)


def capture_nodes(job: Job, listings: Sequence[Listing], settings: Settings) -> Capture:
    """Collect on all nodes of the job in parallel; `listings` are from all nodes, including those without an answer."""
    parts = [part.listing for part in job.parts]
    return _capture(job, [listing for listing in listings if listing not in parts], settings, list(job.problems()))


def _capture(job: Job, others: Sequence[Listing], settings: Settings, problems: list[str]) -> Capture:
    taken = time.time()
    tool = "" if job.parts[0].listing.connection.is_here else packed_py_spy()
    without = [part.listing for part in job.parts if not _has_py_spy(part.listing, tool)]
    if without and not without[0].connection.is_here:
        names, machines = _names(without), sorted({listing.machine for listing in without})
        problems.append(NO_PY_SPY_THERE.format(names, " and ".join(machines), install_command("capture")))
    nodes = [*_collected(job, settings, tool), *map(_unreached, others)]
    for number, node in enumerate(nodes):
        node.name = f"node-{number}"
    if all(node.reason for node in nodes):
        raise CaptureFailed("the capture returned nothing", nodes[0].reason)
    redactor = bundle.redactor_of(nodes)
    files = bundle.files_of(nodes, redactor)
    summaries = tuple(map(summarize, nodes))
    ranks = tuple(identity(rank) for part in job.parts for rank in part.job["ranks"])
    seconds = time.time() - taken
    about = {
        "seconds": round(seconds, 2),
        "interval_s": settings.interval_s,
        "nodes": list(about_nodes(nodes, summaries, files, redactor)),
        "windows": [window for node in nodes for window in offered_windows(node)],
        "asked": settings.trigger,
    }
    problems += [problem for summary in summaries for problem in summary.named_problems()]
    problems += dict.fromkeys(filter(None, (plan.guessed_ranks(part.job) for part in job.parts)))
    stamp = datetime.fromtimestamp(taken, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"kb-capture-{job.slurm_job or job.parts[0].job['id']}-{stamp}-{secrets.token_hex(2)}"
    return Capture(name, archive.pack(files, about, taken), seconds, ranks, tuple(problems), summaries)


def _collected(job: Job, settings: Settings, tool: str) -> list[bundle.Node]:
    """The nodes of the job. Those that are asked in parallel begin at the same moment, each by its own clock."""
    listings = [part.listing for part in job.parts]
    slowest = max(listing.seconds for listing in listings)
    delay = min(MOST_DELAY_S, SLOWER * slowest)
    begin = time.time() + delay
    share = max(LEAST_SHARE, min(MOST_SHARE, MOST_BYTES // len(listings)))
    options = [
        {
            "job": part.job,
            "interval": settings.interval_s,
            "seconds": settings.seconds,
            "native": settings.native,
            "trigger": settings.trigger,
            "py_spy": part.listing.py_spy,
            "sent_py_spy": tool if not part.listing.py_spy and _has_py_spy(part.listing, tool) else "",
            "begin": begin + part.listing.skew.ahead_s if part.listing.skew else 0.0,
            "most_bytes": share,
            "is_first": number == 0,
        }
        for number, part in enumerate(job.parts)
    ]
    answers = gather.collect([listing.connection for listing in listings], options, delay + settings.seconds)
    return [_node(part, answer) for part, answer in zip(job.parts, answers, strict=True)]


def _node(part: Part, answer: Collected | str) -> bundle.Node:
    name, skew = part.listing.connection.name, part.listing.skew
    if isinstance(answer, str):
        return bundle.Node({**part.job, "ranks": []}, Collected({}, (), 0.0), host=name, skew=skew, reason=answer)
    return bundle.Node(part.job, answer, host=name, skew=skew)


def _unreached(listing: Listing) -> bundle.Node:
    """A node that did not list its jobs or has no process of this job."""
    empty = Collected({}, listing.problems, listing.seconds)
    return bundle.Node({"ranks": []}, empty, host=listing.connection.name, skew=listing.skew, reason=listing.reason)


def packed_py_spy() -> str:
    """The py-spy program, packed for the agent; empty if there is none or it is a script."""
    path = gather.py_spy()
    try:
        program = Path(path).read_bytes() if path else b""
    except OSError:
        return ""
    return base64.b64encode(zlib.compress(program)).decode() if program.startswith(b"\x7fELF") else ""


def _has_py_spy(listing: Listing, tool: str) -> bool:
    return bool(listing.py_spy) or bool(tool and listing.machine == gather.machine())


def _names(listings: Sequence[Listing]) -> str:
    names = [listing.connection.name for listing in listings]
    return ", ".join(names[: plan.MOST_LISTED]) + (" and others" if len(names) > plan.MOST_LISTED else "")
