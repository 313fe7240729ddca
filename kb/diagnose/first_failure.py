"""Which rank failed first, which never came, and which the log knows at all."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kb.diagnose.evidence import CONCLUDED, Exit, Line, Scan
from kb.diagnose.failure_lines import is_aftermath, is_failure, is_raised
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

    @property
    def has_raised(self) -> bool:
        """Whether the first failure is an exception, which ends what it is raised in; much else is survived."""
        return self.first is not None and is_raised(self.first.text)

    def to_json(self) -> dict[str, Any]:
        first = self.first.to_json() if self.first else None
        return {"failed_first": self.failed, "first_failure": first, "absent": self.absent, "known": self.known}


@dataclass(frozen=True, slots=True)
class _Failure:
    """Lines that say the same, all or the first few, and all ranks that printed it."""

    lines: tuple[Line, ...]
    ranks: frozenset[int]


def culprits(scan: Scan, candidates: Sequence[Candidate]) -> Culprits:
    """From everything that was found."""
    told = _told(scan)
    failures = _roots(candidates) or _own(scan, candidates) or ([_Failure((told.line,), frozenset())] if told else [])
    first = earliest(line for failure in failures for line in failure.lines)
    ranks = {rank for failure in failures for rank in failure.ranks}
    failed = first.rank if first and (len(ranks) < 2 or _is_ordered(failures, scan)) else None
    if told and first and first.rank is None:
        failed = told.rank
    absent = sorted({rank for line in scan.observations for rank in _absent(line)})
    return Culprits(first, failed, tuple(absent)[:MOST_RANKS], scan.ranks[:MOST_RANKS])


def earliest(lines: Iterable[Line]) -> Line | None:
    """By time where all have comparable ones, else as one log has them, else as they are given."""
    some = list(lines)
    if _is_timed(some):
        return min(some, key=lambda line: (line.time or 0.0, line.number), default=None)
    return min(some, key=lambda line: line.number) if _is_one_log(some) else some[0]


def _roots(candidates: Sequence[Candidate]) -> list[_Failure]:
    """What names a cause, as a rank printed it: what kb or a launcher concluded is not the failure itself."""
    roots = (sighting for candidate in candidates if candidate.role == "root" for sighting in candidate.sightings)
    return [
        _Failure(root.lines, frozenset(root.ranks))
        for root in roots
        if root.role == "root" and all(is_printed(line) and not is_aftermath(line.text) for line in root.lines)
    ]


def _own(scan: Scan, candidates: Sequence[Candidate]) -> list[_Failure]:
    """Failures that are no consequence; only exceptions where there are some: what was retried is logged as well."""
    sightings = (sighting for candidate in candidates for sighting in candidate.sightings if sighting.role == "cascade")
    waiting = {(line.source, line.number) for sighting in sightings for line in sighting.lines}
    own = [
        failure
        for failure in scan.failures
        if is_printed(failure.line)
        and not is_aftermath(failure.line.text)
        and (failure.line.source, failure.line.number) not in waiting
        and not failure.line.text.startswith("Traceback")
    ]
    chosen = [one for one in own if is_raised(one.line.text)] or own
    return [_Failure((one.line,), frozenset(one.ranks)) for one in chosen]


def _told(scan: Scan) -> Exit | None:
    """What the launcher says of a rank that neither waited nor was told to end. Its summary ends with the first."""
    waited = {timeout.rank for timeout in scan.timeouts}
    alone = [one for one in scan.exits if one.code not in ENDED_BY_OTHERS and one.rank not in waited]
    return alone[-1] if alone else None


def is_printed(line: Line) -> bool:
    """By the job, and not a sentence of kb: those stand for a dump, or begin with its name."""
    return not line.text.startswith(CONCLUDED) and (line.number > 0 or is_failure(line.text))


def _absent(line: Line) -> list[int]:
    """Ranks that a sentence of kb says did not come."""
    named = ABSENT.search(line.text)
    runs = re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", named[1]) if named else []
    return [rank for low, high in runs for rank in range(int(low), min(int(high or low), int(low) + MOST_RANKS) + 1)]


def _is_timed(lines: Sequence[Line]) -> bool:
    times = [line.time for line in lines if line.time is not None]
    return len(times) == len(lines) and (_is_one_log(lines) or min(times, default=0.0) >= SINCE_EPOCH)


def _is_one_log(lines: Sequence[Line]) -> bool:
    return len({line.source for line in lines}) <= 1


def _is_ordered(failures: Sequence[_Failure], scan: Scan) -> bool:
    """Whether it can be told which of several ranks came first: by time where all are cited, or as one log has it."""
    lines = [line for failure in failures for line in failure.lines]
    is_complete = all(failure.ranks == {line.rank for line in failure.lines} for failure in failures)
    return scan.sources == 1 or (is_complete and _is_timed(lines))
