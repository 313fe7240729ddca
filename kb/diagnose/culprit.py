"""Which rank failed first, which never came, and which the log knows at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kb.diagnose.evidence import Exit, Line, Scan
from kb.diagnose.failing import is_aftermath, is_failure, is_raised
from kb.diagnose.ranking import Candidate

MOST_RANKS = 64
SINCE_EPOCH = 1e9  # seconds; smaller ones count from the start of a machine and compare within one file
ENDED_BY_OTHERS = (0, -15)  # exit codes of a rank that was told to end: SIGTERM
ABSENT = re.compile(r"ranks? ([\d, and-]{1,400}) (?:never issued|reported no timeout)")


@dataclass(frozen=True, slots=True)
class Culprits:
    """`first` is the earliest line that reports a failure of its own, not one of waiting; None when there is none.

    `failed` is its rank, or what the launcher says when no line tells; None as well where several ranks failed and
    nothing says which was first. `absent` are ranks that did not come to a collective in which others wait; `known`
    all ranks that are named.
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
    told = _told(scan)
    lines = _roots(candidates) or _own(scan, candidates) or ([told.line] if told else [])
    first = earliest(lines)
    ranks = {line.rank for line in lines if line.rank is not None}
    is_known = first is not None and first.rank is not None and (len(ranks) == 1 or _is_ordered(lines))
    failed = first.rank if first and is_known else told.rank if told and not ranks else None
    absent = sorted({rank for line in scan.observations for rank in _absent(line)})
    return Culprits(first, failed, tuple(absent)[:MOST_RANKS], scan.ranks[:MOST_RANKS])


def earliest(lines: Iterable[Line]) -> Line | None:
    """By time where all have comparable ones, else as they were read."""
    some = list(lines)
    if some and _is_timed(some):
        return min(some, key=lambda line: (line.time or 0.0, line.number))
    return some[0] if some else None


def _roots(candidates: Sequence[Candidate]) -> list[Line]:
    """Lines that name a cause, as a rank printed them: what kb or a launcher concluded is not the failure itself."""
    sightings = (one for candidate in candidates if candidate.role == "root" for one in candidate.sightings)
    lines = (line for sighting in sightings if sighting.role == "root" for line in sighting.lines)
    return [line for line in lines if _is_printed(line) and not is_aftermath(line.text)]


def _own(scan: Scan, candidates: Sequence[Candidate]) -> list[Line]:
    """Failures that are no consequence; only exceptions where there are some: what was retried is logged as well."""
    sightings = (one for candidate in candidates for one in candidate.sightings if one.role == "cascade")
    waiting = {(line.source, line.number) for sighting in sightings for line in sighting.lines}
    own = [
        one.line
        for one in scan.failures
        if _is_printed(one.line)
        and not is_aftermath(one.line.text)
        and (one.line.source, one.line.number) not in waiting
        and not one.line.text.startswith("Traceback")
    ]
    return [line for line in own if is_raised(line.text)] or own


def _told(scan: Scan) -> Exit | None:
    """What the launcher says of a rank that neither waited nor was told to end. Its summary ends with the first."""
    waited = {timeout.rank for timeout in scan.timeouts}
    alone = [one for one in scan.exits if one.code not in ENDED_BY_OTHERS and one.rank not in waited]
    return alone[-1] if alone else None


def _is_printed(line: Line) -> bool:
    """By the job, and not a sentence of kb: those stand for a dump, or begin with its name."""
    return not line.text.startswith("kb: ") and (line.number > 0 or is_failure(line.text))


def _absent(line: Line) -> list[int]:
    """Ranks that a sentence of kb says did not come."""
    named = ABSENT.search(line.text)
    runs = re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", named[1]) if named else []
    return [rank for low, high in runs for rank in range(int(low), min(int(high or low), int(low) + MOST_RANKS) + 1)]


def _is_timed(lines: Sequence[Line]) -> bool:
    times = [line.time for line in lines if line.time is not None]
    is_one = len({line.source for line in lines}) == 1
    return len(times) == len(lines) and (is_one or min(times) >= SINCE_EPOCH)


def _is_ordered(lines: Sequence[Line]) -> bool:
    """Whether it can be told which came first: by time, or as one log has it."""
    return _is_timed(lines) or len({line.source for line in lines}) == 1
