"""Reads the record of a process from `kb capture`: two samples of /proc, a stack for each, and its child processes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kb.diagnose.frames import Place
from kb.diagnose.inputs.bundle import PROCESS_SCHEMA
from kb.diagnose.readers.stacks import main_place
from kb.diagnose.readers.structured import Unreadable, as_integer, as_text, load_json

MOST_CHILDREN = 64
BUSY = 0.5  # share of the time between the samples; a process that uses more processor time is busy
LITTLE = 0.02
READS = 1 << 20  # bytes; a process that read more between the samples is reading
OOM_KILL = re.compile(r"^oom_kill (\d{1,9})$", re.MULTILINE)
WAITS = ("init_process_group", "new_group", "destroy_process_group")  # ranks wait for each other in these too


@dataclass(frozen=True, slots=True)
class Change:
    """What changed between samples `seconds` apart: processor time, bytes read, and whether the main thread ran."""

    seconds: float
    cpu_s: float
    read: int
    has_run: bool | None  # None if the counters are missing

    @property
    def is_busy(self) -> bool:
        return self.cpu_s > BUSY * self.seconds

    def __str__(self) -> str:
        if self.is_busy:
            return f"used {self.cpu_s:.1f} s of CPU in {self.seconds:.1f} s"
        reading = f"read {self.read / 1e6:,.0f} MB" if self.read > READS else "read nothing"
        cpu = "no CPU" if self.cpu_s <= LITTLE * self.seconds else f"{self.cpu_s:.1f} s of CPU"
        return f"used {cpu} and {reading} in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class Process:
    """A rank or one of its child processes. `places` has the place in each sample; None if there is no stack."""

    source: str
    rank: int | None
    pid: int
    command: str
    node: str
    state: str
    wchan: str
    was_in_disk_sleep: bool
    tracer: int
    places: tuple[Place | None, Place | None]
    change: Change | None
    has_ended: bool
    reason: str  # why there is no stack
    children: tuple[Process, ...] = ()
    oom_kills: int = 0  # as counted by its cgroup

    @property
    def place(self) -> Place | None:
        return self.places[1] or self.places[0]

    @property
    def stays(self) -> bool:
        """Whether both samples have the same frames; False without two stacks."""
        first, second = self.places
        return first is not None and second is not None and first.frames == second.frames

    @property
    def waits_for_others(self) -> bool:
        """Whether the process waited for other ranks between the samples.

        Its main thread did not run, or it spins, as NCCL does, or it polls the store from time to time.
        """
        place = self.place
        if place is None or not self.stays or not _needs_others(place):
            return False
        return self.change is None or not self.change.has_run or self.change.is_busy or place.name in WAITS

    @property
    def is_halted(self) -> bool:
        """Whether something outside its program keeps it from running."""
        return self.state in "Tt" or self.tracer > 0 or self.was_in_disk_sleep


def _needs_others(place: Place) -> bool:
    return place.is_collective or place.may_hide_collective or place.name in WAITS


def is_process(document: dict[str, Any]) -> bool:
    return document.get("schema") == PROCESS_SCHEMA


def read_record(data: bytes, most_values: int) -> dict[str, Any]:
    """A record as a dictionary. Raises `Unreadable`."""
    document = load_json(data, most_values)
    if not isinstance(document, dict):
        raise Unreadable("not a record of kb capture")
    return document


def read_process(document: dict[str, Any], source: str) -> Process:
    """The process in a record, with its child processes."""
    samples = [sample if isinstance(sample, dict) else {} for sample in _list(document.get("samples"))][:2]
    last = next((sample for sample in reversed(samples) if sample), {})
    named = document.get("errors")
    errors: dict[str, Any] = named if isinstance(named, dict) else {}
    stacks = [main_place(stack) if isinstance(stack, str) else None for stack in _list(document.get("stacks"))][:2]
    places = (*stacks, None, None)[:2]
    children = [child for child in _list(document.get("children"))[:MOST_CHILDREN] if isinstance(child, dict)]
    return Process(
        source=source,
        rank=as_integer(document.get("rank")),
        pid=as_integer(document.get("pid")) or 0,
        command=as_text(document.get("command")),
        node=as_text(document.get("node")),
        state=as_text(last.get("state"), 1),
        wchan=as_text(last.get("wchan"), 60),
        was_in_disk_sleep=bool(samples) and all(sample.get("state") == "D" for sample in samples if sample),
        tracer=as_integer(last.get("tracer")) or 0,
        places=(places[0], places[1]),
        change=_change(samples),
        has_ended=any("has ended" in str(error) for error in errors.values()),
        reason="" if any(places) else as_text(errors.get("stack-2") or errors.get("stack-1"), 300),
        children=tuple(read_process(child, source) for child in children),
        oom_kills=_oom_kills(document.get("facts")),
    )


def _oom_kills(facts: Any) -> int:
    files = facts.get("cgroup_files") if isinstance(facts, dict) else None
    texts = [files.get(name) for name in ("memory.events", "memory.oom_control")] if isinstance(files, dict) else []
    counts = [OOM_KILL.search(text) for text in texts if isinstance(text, str)]
    return max((int(count[1]) for count in counts if count), default=0)


def _change(samples: list[dict[str, Any]]) -> Change | None:
    if len(samples) < 2 or not all(samples):
        return None
    first, second = samples
    switches = [sample.get("switches") for sample in samples]
    return Change(
        seconds=max(0.001, _number(second, "uptime_s") - _number(first, "uptime_s")),
        cpu_s=max(0.0, _number(second, "cpu_s") - _number(first, "cpu_s")),
        read=int(_number(second, "read") - _number(first, "read")),
        has_run=None if None in switches else switches[0] != switches[1],
    )


def _number(sample: dict[str, Any], key: str) -> float:
    value = sample.get(key)
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1 << 62 else 0.0


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
