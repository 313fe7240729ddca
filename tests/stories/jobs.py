"""The jobs of jobs.toml: what each runs, and what is expected of it."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CLASSES = frozenset(
    ("diverge", "uneven", "shape", "slow", "silent", "error", "error-all", "killed", "exit", "nan", "zero", "stuck")
) | {"spike", "resume", "throughput", "never-started", "healthy"}
ENDS_WELL = frozenset({"nan", "zero", "stuck", "spike", "resume", "throughput", "healthy"})
ENDS = frozenset({"exception", "killed", "exit", "terminated", "done", "hung"})


@dataclass(frozen=True)
class Job:
    """One job. `fails`: whether its launcher ends with another code than 0; `attempt`: the one that truth.json describes."""

    name: str
    program: str
    fault: str
    kind: str  # "class" in jobs.toml and truth.json
    launch: str = "torchrun"
    world: int = 4
    style: str = "plain"
    python: str = "2.13"
    culprit: int | None = None
    entries: tuple[str, ...] = ()
    also: tuple[str, ...] = ()
    also_class: tuple[str, ...] = ()
    timeout: float = 6.0
    arguments: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    absent: int | None = None
    runs: int = 1  # a job that resumes is run twice, into one log, as a requeued one
    attempt: int = 0
    fails: bool = True
    half: str = ""
    kernel: bool = False  # the kernel's lines about the process that it killed follow the log


def read_jobs(file: Path = HERE / "jobs.toml") -> dict[str, Job]:
    """All jobs by name; what a job does not say is said once for its fault, under `[faults]`."""
    document = tomllib.loads(file.read_text(encoding="utf-8"))
    faults: dict[str, dict[str, Any]] = document["faults"]
    return {name: made(name, {**faults.get(own["fault"], {}), **own}) for name, own in document["jobs"].items()}


def made(name: str, fields: dict[str, Any]) -> Job:
    kind = fields.pop("class")
    if kind not in CLASSES:
        raise ValueError(f"{name}: unknown class {kind}")
    fields.setdefault("fails", kind not in ENDS_WELL)
    fields.setdefault("half", half(name))
    for key in ("entries", "also", "also_class", "arguments"):
        fields[key] = tuple(fields.get(key, ()))
    return Job(name=name, kind=kind, **fields)


def half(name: str) -> str:
    """By the parity of the hash of the name: nobody chooses which jobs rules are tuned on."""
    return "held" if hashlib.sha256(name.encode()).digest()[0] % 2 else "tuned"
