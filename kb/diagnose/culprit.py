"""Which rank failed first, which never came, and which the log knows at all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kb.diagnose.evidence import Line, Scan
from kb.diagnose.ranking import Candidate

MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class Culprits:
    """`first` is the earliest line that reports a failure of its own, not one of waiting; None when there is none.

    `failed` is its rank, or what the launcher says when no line tells; `absent` are ranks that did not come to a
    collective in which others wait; `known` all ranks that are named.
    """

    first: Line | None
    failed: int | None
    absent: tuple[int, ...]
    known: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        first = self.first.to_json() if self.first else None
        return {"failed_first": self.failed, "first_failure": first, "absent": self.absent, "known": self.known}


def culprits(scan: Scan, candidates: Sequence[Candidate]) -> Culprits:
    """From everything that was found."""
    waiting = {
        (line.source, line.number)
        for one in candidates
        for sighting in one.sightings
        if sighting.role == "cascade"
        for line in sighting.lines
    }
    roots = [line for one in candidates if one.role == "root" for line in one.lines if line.number]
    own = [one.line for one in scan.failures if (one.line.source, one.line.number) not in waiting]
    first = earliest(roots) or earliest(own)
    told = scan.exits[-1].rank if scan.exits else None  # torchrun's summary ends with the first observed failure
    failed = first.rank if first and first.rank is not None else told
    absent = {line.rank for line in scan.observations if line.rank is not None and _never_came(line.text)}
    return Culprits(first, failed, tuple(sorted(absent))[:MOST_RANKS], scan.ranks[:MOST_RANKS])


def _never_came(text: str) -> bool:
    return "never issued" in text or "reported no timeout" in text


def earliest(lines: Iterable[Line]) -> Line | None:
    """By time where all have one, else as they were read."""
    some = list(lines)
    if some and all(line.time is not None for line in some):
        return min(some, key=lambda line: (line.time or 0.0, line.number))
    return some[0] if some else None
