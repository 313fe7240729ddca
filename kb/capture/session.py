"""One capture from its plan to the bytes of its bundle."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kb.capture import archive, bundle, gather, plan
from kb.installation import install_command

NO_PY_SPY = "py-spy is not installed, so there are no stacks: {}"
MOST_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    """`interval_s` between the samples; `seconds` bounds the collection; `native` pauses, `trigger` asks processes."""

    interval_s: float = 3.0
    seconds: float = 30.0
    native: bool = False
    trigger: bool = False


@dataclass(frozen=True, slots=True)
class Capture:
    """`name` of the bundle without its suffix, its bytes, and what could not be done, each with its remedy."""

    name: str
    data: bytes
    seconds: float
    ranks: tuple[Mapping[str, Any], ...]
    problems: tuple[str, ...]


def capture(job: Mapping[str, Any], settings: Settings) -> Capture:
    """Collect on this node and pack. Raises `CaptureFailed` when nothing came back."""
    taken = time.time()
    tool = gather.py_spy()
    options = {
        "job": job,
        "interval": settings.interval_s,
        "seconds": settings.seconds,
        "native": settings.native,
        "trigger": settings.trigger,
        "py_spy": tool,
    }
    node = bundle.Node(job, gather.collect(options))
    files = bundle.files_of(node)
    problems = [*_problems(node), *([] if tool else [NO_PY_SPY.format(install_command("capture"))])]
    if guessed := plan.guessed_ranks(job):
        problems.append(guessed)
    ranks = tuple({key: rank[key] for key in ("rank", "rank_from", "pid")} for rank in job["ranks"])
    about = {
        "seconds": round(node.collected.seconds, 2),
        "interval_s": settings.interval_s,
        "nodes": [{"name": node.name, "ranks": ranks, "steps": _steps(files)}],
        "windows": plan.offered_windows(node.json("node/windows.json") or {}),
        "asked": settings.trigger,
    }
    stamp = datetime.fromtimestamp(taken, UTC).strftime("%Y%m%dT%H%M%SZ")
    name = f"kb-capture-{job['slurm_job'] or job['id']}-{stamp}-{secrets.token_hex(2)}"
    return Capture(name, archive.pack(files, about, taken), node.collected.seconds, ranks, tuple(problems))


def _steps(files: list[bundle.File]) -> Any:
    """The steps as they are in the record of the node, which is redacted."""
    return next((json.loads(file.content)["steps"] for file in files if file.kind == "node"), [])


def _problems(node: bundle.Node) -> list[str]:
    """One sentence per reason, with the ranks that it is about."""
    reasons: dict[str, list[str]] = {}
    for step in node.steps:
        if error := step.get("error"):
            places = reasons.setdefault(error.replace(str(step.get("pid", "")) or "\0", ""), [])
            place = f"{step['step']} of {step['where']}"
            if place not in places:
                places.append(place)
    sentences = [
        f"{', '.join(places[:4])}{' and others' if len(places) > 4 else ''}: {reason}"
        for reason, places in reasons.items()
    ]
    return [*node.collected.problems, *sentences][:MOST_PROBLEMS]
