"""Whether an entry was recognised by what only followed: another failure came first, and no entry knows that one.

Ranks that wait or survive print the same whatever the one that failed met. An entry that is known by such lines alone
is not the cause where another rank raised something of its own before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kb.diagnose.evidence import Line, Sighting
from kb.diagnose.failure_lines import is_aftermath, is_launcher
from kb.diagnose.first_failure import Culprits, is_printed
from kb.diagnose.ranking import Candidate

TRACEBACK_LINES = 40  # its last line stands below its first, perhaps by as much

WAITED = "what was printed is what waiting or surviving ranks print"


def is_elsewhere(candidates: Sequence[Candidate], who: Culprits) -> bool:
    """Whether the best of all entries stands for what followed, and what failed first is on no entry's lines."""
    if not candidates or who.first is None or any(who.first in _lines(candidate) for candidate in candidates):
        return False
    best = candidates[0]
    if who.has_raised and _is_launched(best):
        return True
    return best.role == "cascade" and not best.caused_by and _is_culprit(who) and _is_preceded(best, who)


def objection(one: Candidate, who: Culprits) -> str:
    """What is held against an entry whose lines name no cause: what failed first, where that is known."""
    first = who.first
    if first is None or is_aftermath(first.text):
        return f"{WAITED}; the cause itself is not in these logs"
    if not _is_preceded(one, who):
        return f"{WAITED}; another failure was printed: {first.place}"
    before = f"rank {who.failed} failed first" if who.failed is not None else "something else failed before"
    is_sure = who.has_raised and _is_culprit(who)
    return f"{'the cause is not this' if is_sure else WAITED}; {before}: {first.place} {first.text}"


def is_before(line: Line, first: Line) -> bool:
    """Not later than the first failure, as far as the two can be compared. A traceback is one failure of one rank."""
    if line.source == first.source:
        return line.number <= first.number + (TRACEBACK_LINES if line.rank == first.rank else 0)
    return line.time is None or first.time is None or line.time <= first.time + 1


def _is_preceded(one: Candidate, who: Culprits) -> bool:
    """Whether a rank that prints none of an entry's lines failed before all of these that compare with its own."""
    first = who.first
    if first is None or is_aftermath(first.text) or first.rank in _ranks(one):
        return False
    known = [line for line in _lines(one) if first.rank is None or _has_order(line, first)]
    return not any(is_before(line, first) for line in known)


def _is_culprit(who: Culprits) -> bool:
    """Whether the first failure and the ranks that did not come accuse the same rank; where no rank is named, whether
    it is an exception."""
    if who.failed is None:
        return who.has_raised
    return not who.absent or who.failed in who.absent


def _is_launched(one: Candidate) -> bool:
    """Whether all that is known is what the launcher said of the end."""
    lines = [line for sighting in _evident(one) for line in sighting.lines]
    return bool(lines) and all(is_launcher(line.text) for line in lines)


def _evident(one: Candidate) -> Iterable[Sighting]:
    return (sighting for sighting in one.sightings if sighting.role != "context")


def _lines(one: Candidate) -> list[Line]:
    """As the job printed them: a sentence of kb stands at the line of another rank than the one it names."""
    return [line for sighting in _evident(one) for line in sighting.lines if is_printed(line)]


def _ranks(one: Candidate) -> set[int]:
    return {rank for sighting in _evident(one) if any(map(is_printed, sighting.lines)) for rank in sighting.ranks}


def _has_order(line: Line, other: Line) -> bool:
    return line.source == other.source or (line.time is not None and other.time is not None)
