"""Finds which rank failed first, which ranks never came to a collective, and which ranks the inputs name."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from kb.diagnose.evidence import DERIVED_PREFIX, SINCE_EPOCH, Exit, Line
from kb.diagnose.failure_lines import is_aftermath, is_failure, is_raised
from kb.diagnose.ranking import Candidate
from kb.diagnose.scan.result import Scan
from kb.diagnose.story.fact import Fact

MOST_RANKS = 64
ENDED_BY_OTHERS = (0, -15)  # exit codes of a rank that did not fail by itself; -15 is SIGTERM
ABSENT = re.compile(
    r"ranks? ([\d, and-]{1,400}) (?:never issued|reported no timeout"
    r"|(?:is|are) (?:stopped|traced|in uninterruptible|in .{1,250}?, (?:in no collective|not with the others), while))"
)


@dataclass(frozen=True, slots=True)
class RankSummary:
    """`first_failure` is the earliest line that reports a rank's own failure, not one of waiting; None without one.

    `failed_first` is the rank that printed it, or the rank that the launcher names if no rank is known; None if several
    ranks failed in unknown order. `absent` are ranks that did not come to a collective in which others wait. `known`
    are all ranks that are named. `culprit` is the fact of the story that says which rank failed, and how.
    """

    first_failure: Line | None
    failed_first: int | None
    absent: tuple[int, ...]
    known: tuple[int, ...]
    culprit: Fact | None = None

    @property
    def has_raised(self) -> bool:
        """Whether the first failure is an exception, which is seldom survived; other failures often are."""
        return self.first_failure is not None and is_raised(self.first_failure.text)

    def to_json(self) -> dict[str, Any]:
        first = self.first_failure.to_json() if self.first_failure else None
        return {"failed_first": self.failed_first, "first_failure": first, "absent": self.absent, "known": self.known}


@dataclass(frozen=True, slots=True)
class _OwnFailure:
    """The first few of equal failure lines, and all ranks that printed them."""

    lines: tuple[Line, ...]
    ranks: frozenset[int]


def summarize_ranks(scan: Scan, candidates: Sequence[Candidate]) -> RankSummary:
    exit_ = _unprovoked_exit(scan)
    culprit = scan.story.culprit
    failures = _roots(candidates) or _culprits(culprit) or _unknown_failures(scan, candidates)
    if exit_ and not failures:
        failures = [_OwnFailure((exit_.line,), frozenset())]
    first = earliest(line for failure in failures for line in failure.lines)
    ranks = {rank for failure in failures for rank in failure.ranks}
    failed_first = first.rank if first and (len(ranks) < 2 or _is_ordered(failures, scan)) else None
    if exit_ and first and first.rank is None:
        failed_first = exit_.rank
    absent = sorted({rank for line in scan.observations for rank in _absent_ranks(line)} | set(scan.story.absent))
    return RankSummary(first, failed_first, tuple(absent)[:MOST_RANKS], scan.ranks[:MOST_RANKS], culprit)


def earliest(lines: Iterable[Line]) -> Line | None:
    """The earliest by time if all lines have comparable times, else by number within one log, else the first given."""
    lines = list(lines)
    if _is_timed(lines):
        return min(lines, key=lambda line: (line.time or 0.0, line.number), default=None)
    return min(lines, key=lambda line: line.number) if _share_a_log(lines) else lines[0]


def _roots(candidates: Sequence[Candidate]) -> list[_OwnFailure]:
    """Root matches on lines that a rank printed; conclusions of kb or a launcher are not the failure itself."""
    roots = (match for candidate in candidates if candidate.role == "root" for match in candidate.matches)
    return [
        _OwnFailure(root.lines, frozenset(root.ranks))
        for root in roots
        if root.role == "root" and all(is_from_log(line) and not is_aftermath(line.text) for line in root.lines)
    ]


def _culprits(culprit: Fact | None) -> list[_OwnFailure]:
    """The failure of the rank that failed by itself, according to the story of the job."""
    return [_OwnFailure(culprit.lines[-1:], frozenset(culprit.ranks))] if culprit else []


def _unknown_failures(scan: Scan, candidates: Sequence[Candidate]) -> list[_OwnFailure]:
    """Failures that are not a consequence; only the exceptions if there are any, since retries log failures too."""
    cascades = (match for candidate in candidates for match in candidate.matches if match.role == "cascade")
    waiting = {(line.source, line.number) for match in cascades for line in match.lines}
    own = [
        failure
        for failure in scan.failures
        if is_from_log(failure.line)
        and not is_aftermath(failure.line.text)
        and (failure.line.source, failure.line.number) not in waiting
        and "Traceback (most recent" not in failure.line.text
    ]
    raised = [failure for failure in own if is_raised(failure.line.text)]
    return [_OwnFailure((failure.line,), frozenset(failure.ranks)) for failure in raised or own]


def _unprovoked_exit(scan: Scan) -> Exit | None:
    """The first exit of a rank that neither waited nor was terminated; the launcher's summary lists it last."""
    waiting = {timeout.rank for timeout in scan.timeouts} | scan.story.waiting
    exits = [end for end in scan.exits if end.code not in ENDED_BY_OTHERS and end.rank not in waiting]
    return exits[-1] if exits else None


def is_from_log(line: Line) -> bool:
    """Whether the job printed a line, rather than kb deriving it from a dump or several lines."""
    return not line.text.startswith(DERIVED_PREFIX) and (line.number > 0 or is_failure(line.text))


def _absent_ranks(line: Line) -> list[int]:
    """The ranks that did not come, according to an observation."""
    match = ABSENT.search(line.text)
    runs = re.findall(r"(\d{1,6})(?:-(\d{1,6}))?", match[1]) if match else []
    return [rank for low, high in runs for rank in range(int(low), min(int(high or low), int(low) + MOST_RANKS) + 1)]


def _is_timed(lines: Sequence[Line]) -> bool:
    times = [line.time for line in lines if line.time is not None]
    return len(times) == len(lines) and (_share_a_log(lines) or min(times, default=0.0) >= SINCE_EPOCH)


def _share_a_log(lines: Sequence[Line]) -> bool:
    return len({line.source for line in lines}) <= 1


def _is_ordered(failures: Sequence[_OwnFailure], scan: Scan) -> bool:
    """Whether the order of the failures is known: they are in one log, or a line of each rank is cited with a time."""
    lines = [line for failure in failures for line in failure.lines]
    is_complete = all(failure.ranks == {line.rank for line in failure.lines} for failure in failures)
    return scan.sources == 1 or (is_complete and _is_timed(lines))
