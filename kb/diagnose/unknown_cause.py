"""Decides whether a candidate explains only consequences of an earlier failure that no entry knows.

Ranks that wait or survive print the same lines whatever made another rank fail. An entry that matches only such lines
is not the cause if another rank raised its own exception before. An entry with that exception among its context lines
describes both the exception and what follows, so it explains the log, though not why the exception was raised. Lines
after which the job made progress did not end it either.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kb.diagnose.evidence import Line, SignatureMatch
from kb.diagnose.failure_lines import is_aftermath, is_launcher, is_raised
from kb.diagnose.first_failure import RankSummary, is_from_log
from kb.diagnose.ranking import Candidate
from kb.diagnose.scan.result import Scan
from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.summary import Story

TRACEBACK_LINES = 40  # the exception may be so many lines below the first line of its traceback

ONLY_CONSEQUENCES = "what was printed is what waiting or surviving ranks print"


def is_cause_unknown(candidates: Sequence[Candidate], ranks: RankSummary) -> bool:
    """Whether the best candidate explains only consequences, and no candidate has a line of the first failure."""
    first = ranks.first_failure
    if candidates and candidates[0].role == "root" and not _is_launcher_only(candidates[0]):
        return False
    if candidates and ranks.culprit:
        return not any(_explains(candidate, ranks.culprit) for candidate in candidates)
    if not candidates or first is None or any(first in _printed_lines(candidate) for candidate in candidates):
        return False
    best = candidates[0]
    if _is_told(best, first):
        return False
    if ranks.has_raised and _is_launcher_only(best):
        return True
    return best.role == "cascade" and not best.caused_by and _is_attributed(ranks) and _is_preceded(best, ranks)


def has_ended_otherwise(candidates: Sequence[Candidate], scan: Scan) -> bool:
    """Whether an exception ended the job and no candidate has a signature on its line."""
    known = {(line.source, line.number) for candidate in candidates for line in candidate.lines}
    fatal = [
        failure.line
        for failure in scan.failures
        if is_raised(failure.line.text)
        and not is_aftermath(failure.line.text)
        and not scan.story.has_survived(failure.line)
    ]
    return bool(fatal) and known.isdisjoint((line.source, line.number) for line in fatal)


def is_survived(candidate: Candidate, story: Story) -> bool:
    """Whether the job made progress after all evidence of a candidate, which therefore did not end it."""
    lines = [line for match in _evident(candidate) for line in match.lines]
    return bool(lines) and all(is_from_log(line) and story.has_survived(line) for line in lines)


def _explains(candidate: Candidate, culprit: Fact) -> bool:
    """Whether a candidate has evidence of the failure itself, not just of what a launcher prints about it."""
    places = {(line.source, line.number) for line in culprit.lines} if culprit.kind != FactKind.ALL_LOST else set()
    return any(
        line.text == culprit.text or ((line.source, line.number) in places and not is_launcher(line.text))
        for match in _evident(candidate)
        for line in match.lines
    )


def objection(candidate: Candidate, ranks: RankSummary) -> str:
    """The objection to a candidate whose lines name no cause: the first failure, if it is known."""
    first = ranks.first_failure
    if first is None or is_aftermath(first.text):
        return f"{ONLY_CONSEQUENCES}; the cause itself is not in these logs"
    if not _is_preceded(candidate, ranks):
        return f"{ONLY_CONSEQUENCES}; another failure was printed: {first.place}"
    if _is_told(candidate, first):
        return f"{first.place} came first and belongs to it; why that happened is not in these logs"
    earlier = (
        f"rank {ranks.failed_first} failed first" if ranks.failed_first is not None else "something else failed first"
    )
    is_certain = ranks.has_raised and _is_attributed(ranks)
    verdict = "the cause is not this" if is_certain else ONLY_CONSEQUENCES
    return f"{verdict}; {earlier}: {first.place} {first.text}"


def _is_told(candidate: Candidate, first: Line) -> bool:
    """Whether a candidate with its own evidence has a context line on the first failure."""
    return candidate.role != "similar" and first in candidate.lines


def is_before(line: Line, first: Line) -> bool:
    """Whether a line is not later than the first failure, or not comparable. A traceback is one failure."""
    if line.source == first.source:
        return line.number <= first.number + (TRACEBACK_LINES if line.rank == first.rank else 0)
    return line.time is None or first.time is None or line.time <= first.time + 1


def _is_preceded(candidate: Candidate, ranks: RankSummary) -> bool:
    """Whether a rank that prints none of a candidate's lines failed before all comparable ones."""
    first = ranks.first_failure
    if first is None or is_aftermath(first.text) or first.rank in _printing_ranks(candidate):
        return False
    comparable = [line for line in _printed_lines(candidate) if first.rank is None or _are_ordered(line, first)]
    return not any(is_before(line, first) for line in comparable)


def _is_attributed(ranks: RankSummary) -> bool:
    """Whether the rank of the first failure fits the absent ranks or, if it is unknown, the failure is an exception."""
    if ranks.failed_first is None:
        return ranks.has_raised
    return not ranks.absent or ranks.failed_first in ranks.absent


def _is_launcher_only(candidate: Candidate) -> bool:
    """Whether all evidence is what the launcher printed at the end."""
    lines = [line for match in _evident(candidate) for line in match.lines]
    return bool(lines) and all(is_launcher(line.text) for line in lines)


def _evident(candidate: Candidate) -> Iterable[SignatureMatch]:
    return (match for match in candidate.matches if match.role != "context")


def _printed_lines(candidate: Candidate) -> list[Line]:
    """Only lines that the job printed; an observation may cite the line of a rank other than the one it names."""
    return [line for match in _evident(candidate) for line in match.lines if is_from_log(line)]


def _printing_ranks(candidate: Candidate) -> set[int]:
    return {rank for match in _evident(candidate) if any(map(is_from_log, match.lines)) for rank in match.ranks}


def _are_ordered(line: Line, other: Line) -> bool:
    return line.source == other.source or (line.time is not None and other.time is not None)
