"""Where the ranks that raised an exception were: in their own failures, or in calls in which they waited."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence

from kb.diagnose.frames import Frame, is_library
from kb.diagnose.story.endings import ABORT
from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.timeline import Attempt
from kb.diagnose.story.tracebacks import Traceback
from kb.harness.collective import name_ranks

BACKWARD = "backward"  # an activity of `kb.diagnose.frames`
MOST_PLACES = 8
LONGEST_ERROR = 160  # characters of an exception in a sentence
SIZES = re.compile(r"data size does|op\.preamble\.length|Invalid mismatched|size mismatch")
NUMBER = re.compile(r"[0-9.]+")

Member = tuple[int | None, Traceback]
Group = list[Member]


def own_failures(attempt: Attempt) -> Iterator[Fact]:
    """Facts about exceptions that do not report waiting, whatever was printed first."""
    failures = attempt.failures
    own = {rank: failure for rank, failure in failures.items() if not failure.has_waited}
    waiting = [rank for rank in failures if rank not in own]
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, failure in own.items():
        alike[f"{NUMBER.sub('N', failure.error)[:120]} @ {failure.place}"].append(rank)
    gave_up_at = max((failures[rank].last.order for rank in waiting), default=0)
    for ranks in map(sorted, list(alike.values())[:MOST_PLACES]):
        failure = own[ranks[0]]
        others = f" while {name_ranks(waiting)} waited" if waiting else ""
        is_late = waiting and gave_up_at < failure.first.order
        late = ", printed after they had given up" if is_late else ""
        text = f"{name_ranks(ranks)} raised {failure.error[:LONGEST_ERROR]} in {failure.place}{others}{late}"
        yield Fact.of(FactKind.OWN_FAILURE, text, tuple(ranks), failure.last.evidence)
    for failure in attempt.anonymous_failures:
        if not failure.has_waited:
            text = f"a rank raised {failure.error[:LONGEST_ERROR]} in {failure.place}"
            yield Fact.of(FactKind.OWN_FAILURE, text, (), failure.last.evidence)


def size_mismatches(attempt: Attempt) -> Iterator[Fact]:
    """Facts about mismatched sizes, for which gloo ends a process in C++ without printing the call that it was in."""
    aborts = [line for line in attempt.endings.aborts if SIZES.search(line.text)]
    if not aborts:
        return
    line = aborts[0]
    aborted = [rank for rank, ending in attempt.endings.by_rank.items() if ending.code == ABORT][:1]
    ranks = (line.rank,) if line.rank is not None else tuple(aborted)
    subject = name_ranks(ranks) if ranks else "a rank"
    waiting = [failure for _, failure in _waiting(attempt, ())]
    places = sorted({failure.place for failure in waiting})
    if len(places) != 1:
        text = f"{subject} aborted over a size that it did not expect"
        yield Fact.of(FactKind.SIZES_DIFFER, text, ranks, line.evidence)
    elif waiting[0].has_fixed_sizes:
        text = f"{subject} received another size than it expected while the others were in {places[0]}"
        text += ", whose sizes are equal on all ranks: it was in another call"
        yield Fact.of(FactKind.DRIFTED, text, ranks, line.evidence)
    else:
        text = f"{subject} received another size than it expected, the others ended in one call: {places[0]}"
        yield Fact.of(FactKind.SIZES_DIFFER_IN_CALL, text, ranks, line.evidence)


def waiting_places(attempt: Attempt, accused: Collection[int]) -> Iterator[Fact]:
    """Facts about whether the ranks that waited, or lost each other, were in one call."""
    waiting = _waiting(attempt, accused)
    is_missing = any(rank not in attempt.failures for rank in attempt.ranks)
    steps = {_function(failure): failure.place for _, failure in waiting if failure.call == BACKWARD}
    groups: dict[str, Group] = defaultdict(list)
    for rank, failure in waiting:
        # In forward and backward of one step, the model's wrapper calls the collectives, which wait for the same rank.
        is_of_step = is_missing and failure.has_fixed_sizes
        groups[steps.get(_function(failure), failure.place) if is_of_step else failure.place].append((rank, failure))
    members = sorted(groups.values(), key=len)
    if len(members) > 1:
        yield from _different_places(members)
    elif members:
        yield from _same_place(members[0])


def _function(failure: Traceback) -> str:
    return f"{failure.own.file}:{failure.own.name}" if failure.own else ""


def _waiting(attempt: Attempt, accused: Collection[int]) -> list[Member]:
    named: list[Member] = [(rank, failure) for rank, failure in attempt.failures.items() if rank not in accused]
    anonymous: list[Member] = [(None, failure) for failure in attempt.anonymous_failures]
    return [member for member in [*named, *anonymous] if member[1].has_waited]


def _different_places(groups: Sequence[Group]) -> Iterator[Fact]:
    lines = tuple(group[0][1].last for group in groups)[:MOST_PLACES]
    smallest, largest = groups[0], groups[-1]
    odd = _ranks(smallest) if len(smallest) < len(largest) else ()
    listed = "; ".join(f"{_subject(group)} in {group[0][1].place}" for group in groups[:MOST_PLACES])
    cited = tuple(line.evidence for line in lines)
    parting = _parting(smallest, largest)
    if parting is None or parting[0] != FactKind.LEFT_LOOP:
        yield Fact.of(FactKind.PLACES_DIFFER, f"ranks ended in different calls: {listed}", odd, *cited)
    if parting:
        yield Fact.of(*parting, odd, *cited)


def _same_place(group: Group) -> Iterator[Fact]:
    failure = group[0][1]
    if len(group) < 2:
        text = f"only {_subject(group)} left a traceback of waiting, in {failure.place}"
        yield Fact.of(FactKind.ONE_PLACE, text, (), failure.last.evidence)
        return
    lost = [(rank, failure) for rank, failure in group if failure.has_lost]
    gave_up = [(rank, failure) for rank, failure in group if not failure.has_lost]
    text = f"{_subject(group)} ended in the same call: {failure.place}"
    is_last = len(lost) == 1 < len(gave_up) and lost[0][1].first.order > max(other.first.order for _, other in gave_up)
    if is_last and lost[0][0] is not None:
        text += f"; {_subject(gave_up)} gave up waiting, then rank {lost[0][0]} lost them"
        yield Fact.of(FactKind.CAME_LAST, text, (lost[0][0],), failure.last.evidence, lost[0][1].last.evidence)
    else:
        yield Fact.of(FactKind.SAME_PLACE, text, (), failure.last.evidence)


def _subject(group: Group) -> str:
    ranks = _ranks(group)
    return name_ranks(ranks) if ranks else f"{len(group)} rank{'s' * (len(group) > 1)}"


def _ranks(group: Group) -> tuple[int, ...]:
    return tuple(sorted(rank for rank, _ in group if rank is not None))


def _parting(smallest: Group, largest: Group) -> tuple[FactKind, str] | None:
    """The kind and text of the fact that says where the user's frames of two stacks part; None if they do not."""
    few, many = (_own_frames(group[0][1]) for group in (smallest, largest))
    for left, right in zip(few, many, strict=False):
        if (left.file, left.name) != (right.file, right.name):
            return None
        if left.line != right.line:
            return _branches(smallest, left, largest, right)
    return None


def _branches(smallest: Group, left: Frame, largest: Group, right: Frame) -> tuple[FactKind, str]:
    """The fact that the small group had left code that the large group was still in, such as a loop, or that they
    called different functions in it.
    """
    function = f"{left.file.split('/')[-1]}, function {left.name}"
    inside, others_inside = _inside(smallest, left), _inside(largest, right)
    few, many = _subject(smallest), _subject(largest)
    if not inside and others_inside and left.line > right.line:
        ahead = f"{few} had gone on to line {left.line} of {function}, in {smallest[0][1].place}"
        return FactKind.LEFT_LOOP, f"{ahead}; {many} were still at line {right.line}{others_inside}"
    sides = f"{few} at line {left.line}{inside}; {many} at line {right.line}{others_inside}"
    return FactKind.PATHS_PART, f"paths part in {function}: {sides}"


def _inside(group: Group, frame: Frame) -> str:
    """The innermost function of the user's code that a frame called, as a clause; empty if it is that frame."""
    innermost = _own_frames(group[0][1])[-1]
    return f", within {innermost.name}" if innermost is not frame else ""


def _own_frames(failure: Traceback) -> list[Frame]:
    return [frame for frame in failure.frames if not is_library(frame)]
