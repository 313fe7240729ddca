"""Finds what the ranks without a traceback did while the others waited: they were busy, silent, done or gone.

If all others wait, a line that names no rank is from the one that does not wait.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from kb.diagnose.story.endings import ABORT, FATAL
from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.progress import TEARDOWN, TRAIN, Progress
from kb.diagnose.story.timeline import STEP_LABELS, Attempt, RankTimeline
from kb.diagnose.story.tracebacks import Traceback
from kb.harness.collective import name_ranks

LEAST_COUNTS = 2  # different counts that a busy rank must print
LEAST_ANONYMOUS_COUNTS = 3
MOST_RANKS = 64  # that are examined one by one
REACH = 60  # seconds or lines; activity that ended earlier before the others gave up does not count
LEAST_STEPS_BEHIND = 2  # a step is printed when it is done, so a difference of one step means nothing


@dataclass(frozen=True, slots=True)
class _Wait:
    """The ranks that gave up, and the place of the first of them.

    `given_up_at` is when the first of them gave up, `start` when they last printed progress before, `step` their last.
    """

    ranks: Collection[int]
    place: str
    given_up_at: float
    start: float
    step: int | None

    @classmethod
    def of(cls, attempt: Attempt, waiting: Mapping[int, Traceback], failures: Sequence[Traceback]) -> _Wait:
        given_up_at = min(attempt.moment(failure.first) for failure in failures)
        moments = (attempt.moment(item.line) for rank in waiting for item in attempt.timelines[rank].progress)
        steps = (attempt.timelines[rank].step for rank in waiting)
        return cls(
            ranks=waiting.keys(),
            place=failures[0].place,
            given_up_at=given_up_at,
            start=max((moment for moment in moments if moment < given_up_at), default=0.0),
            step=max((step for step in steps if step is not None), default=None),
        )

    @property
    def text(self) -> str:
        return f"while {name_ranks(self.ranks)} waited in {self.place}"

    def has_passed(self, progress: Progress) -> bool:
        """Whether the waiting ranks had printed this step too; the output of one rank may come late."""
        is_step = progress.phase in (TRAIN, "") and progress.label in STEP_LABELS
        return is_step and self.step is not None and progress.count is not None and progress.count <= self.step


def late_ranks(attempt: Attempt) -> Iterator[Fact]:
    """Facts about ranks that made progress while their peers waited until a timeout, and then lost these peers."""
    failures = {rank: failure for rank, failure in attempt.failures.items() if failure.has_waited}
    gave_up = {rank: failure for rank, failure in failures.items() if not failure.has_lost}
    if not gave_up or not attempt.is_ordered:
        return
    wait = _Wait.of(attempt, gave_up, list(gave_up.values()))
    lost = [(rank, failure) for rank, failure in failures.items() if failure.has_lost]
    for rank, failure in lost[:MOST_RANKS]:
        end = attempt.moment(failure.first)
        if end <= wait.given_up_at:
            continue
        progress = _between(attempt, attempt.timelines[rank], wait, end)
        if not progress and (anonymous := attempt.timelines.get(None)) and not _is_of_several(anonymous):
            run = _last_run(attempt, [item for item in anonymous.counted if attempt.moment(item.line) < end], end)
            progress = run if _advances_behind(attempt, run, wait.given_up_at) else []
        if len({item.count for item in progress}) >= LEAST_COUNTS:
            text = f"rank {rank} went on with {progress[-1].text} {wait.text}, and came late to {failure.place}"
            yield Fact.of(FactKind.BUSY, text, (rank,), progress[0].line.evidence, progress[-1].line.evidence)


def missing_ranks(attempt: Attempt) -> Iterator[Fact]:
    """Facts about ranks that raised nothing while others gave up waiting."""
    failures = attempt.failures
    waiting = {rank: failure for rank, failure in failures.items() if failure.has_waited}
    anonymous = [failure for failure in attempt.anonymous_failures if failure.has_waited]
    everyone = [*waiting.values(), *anonymous]
    if not everyone:
        return
    if all(failure.has_lost for failure in everyone):
        yield _all_lost(attempt, everyone, is_anonymous=bool(anonymous))
        return
    wait = _Wait.of(attempt, waiting, everyone)
    dead = {rank for rank, ending in attempt.endings.by_rank.items() if ending.code in (*FATAL, ABORT)}
    missing = [rank for rank in attempt.ranks if rank not in failures and rank not in dead] if waiting else []
    facts = [_missing(attempt, rank, waiting, wait) for rank in missing[:MOST_RANKS]]
    active = [fact for fact in facts if fact.kind != FactKind.SILENT]
    if active or len(missing) == 1:
        yield from active or facts
    elif facts:
        text = f"{name_ranks(missing)} left no traceback {wait.text}: one of them did not come"
        yield Fact.of(FactKind.SILENT, text, tuple(missing[:MOST_RANKS]), facts[0].lines[-1])
    elif fact := _anonymous_busy(attempt, wait):
        yield fact


def steps_behind(attempt: Attempt) -> Iterator[Fact]:
    """A fact about ranks whose last step is behind that of others, if all ranks print steps."""
    steps = {rank: timeline.step for rank, timeline in attempt.timelines.items() if rank is not None}
    known = {rank: step for rank, step in steps.items() if step is not None}
    if len(known) < 2 or len(known) < len(steps):
        return
    low, high = min(known.values()), max(known.values())
    if high - low < LEAST_STEPS_BEHIND:
        return
    behind, ahead = ([rank for rank, step in known.items() if step == end] for end in (low, high))
    lines = (attempt.timelines[ranks[0]].counted[-1].line.evidence for ranks in (ahead, behind))
    text = f"last step printed: {name_ranks(behind)} step {low}; {name_ranks(ahead)} step {high}"
    yield Fact.of(FactKind.STEPS_BEHIND, text, tuple(behind), *lines)


def _all_lost(attempt: Attempt, failures: Sequence[Traceback], *, is_anonymous: bool) -> Fact:
    """The fact that no rank timed out, so a rank was gone before."""
    gone = [rank for rank in attempt.ranks if rank not in attempt.failures]
    is_single = len(gone) == 1 and not is_anonymous
    first = min(failures, key=lambda failure: failure.first.order)
    culprit = f"rank {gone[0]} left no traceback" if is_single else "no line says which rank left first"
    text = f"all ranks with a traceback only lost others, in {first.place}: {culprit}"
    return Fact.of(FactKind.ALL_LOST, text, tuple(gone) if is_single else (), first.last.evidence)


def _missing(attempt: Attempt, rank: int, waiting: Mapping[int, Traceback], wait: _Wait) -> Fact:
    others = wait.text
    ended = ", alive when the launcher ended it" if attempt.was_alive(rank) else ""
    timeline = attempt.timelines.get(rank, RankTimeline(rank))
    busy = _busy(attempt, timeline, wait)
    if len({item.count for item in busy}) >= LEAST_COUNTS:
        text = f"rank {rank} went on with {busy[-1].text} {others}{ended}"
        return Fact.of(FactKind.BUSY, text, (rank,), busy[0].line.evidence, busy[-1].line.evidence)
    last = timeline.progress[-1] if timeline.progress else None
    line = last.line if last else next(iter(waiting.values())).first
    if last and any(item.phase == TEARDOWN for item in timeline.progress[-2:]):
        return Fact.of(FactKind.DONE, f"rank {rank} had finished ({last.text}) {others}", (rank,), line.evidence)
    since = f"printed nothing after {last.text}" if last else "printed nothing at all"
    if timeline.interrupted:
        ended, line = f", interrupted in {timeline.interrupted.place}", timeline.interrupted.last
    return Fact.of(FactKind.SILENT, f"rank {rank} {since} and raised nothing {others}{ended}", (rank,), line.evidence)


def _busy(attempt: Attempt, timeline: RankTimeline, wait: _Wait) -> list[Progress]:
    """Counted progress that a missing rank made after the last progress of the waiting ranks."""
    if not attempt.is_ordered:
        return _unfinished(timeline)
    own = _between(attempt, timeline, wait, float("inf"))
    anonymous = attempt.timelines.get(None)
    if own or anonymous is None or _is_of_several(anonymous):
        return own
    lines = [item for item in anonymous.progress if attempt.moment(item.line) > wait.start and item.phase != TEARDOWN]
    run = _last_run(attempt, lines, wait.given_up_at)
    # A training bar may be from a waiting rank, unless it advances after the first rank gave up.
    is_busy = run and (run[-1].phase not in (TRAIN, "") or _advances_behind(attempt, run, wait.given_up_at))
    return [item for item in run if item.count is not None] if is_busy else []


def _unfinished(timeline: RankTimeline) -> list[Progress]:
    """The last counter if it stopped before its total, which is all that logs without a common clock can show."""
    counted = timeline.counted
    last = counted[-1] if counted else None
    if (
        last is None
        or last.total is None
        or last.count is None
        or last.count >= last.total
        or last.phase in (TRAIN, "")
    ):
        return []
    return [item for item in counted if (item.phase, item.label, item.total) == (last.phase, last.label, last.total)]


def _anonymous_busy(attempt: Attempt, wait: _Wait) -> Fact | None:
    """The fact that the only rank that logs was busy, if no line says which rank it is."""
    timeline = attempt.timelines.get(None)
    if timeline is None or not attempt.is_ordered or _is_of_several(timeline):
        return None
    active = (item for item in timeline.counted if item.phase not in ("", TRAIN, TEARDOWN))
    busy = [item for item in active if attempt.moment(item.line) > wait.start]
    run = _last_run(attempt, busy, wait.given_up_at)
    if len({item.count for item in run}) < LEAST_ANONYMOUS_COUNTS:
        return None
    text = f"a rank went on with {run[-1].text} while others waited in {wait.place}"
    return Fact.of(FactKind.BUSY, text, (), run[0].line.evidence, run[-1].line.evidence)


def _between(attempt: Attempt, timeline: RankTimeline, wait: _Wait, end: float) -> list[Progress]:
    """Counted progress after the last of the waiting ranks and before `end`."""
    counted = (item for item in timeline.counted if wait.start < attempt.moment(item.line) < end)
    return [item for item in counted if not wait.has_passed(item)]


def _last_run(attempt: Attempt, progress: Sequence[Progress], moment: float) -> list[Progress]:
    """The last run of one activity, if it ends at most `REACH` before `moment`."""
    run: list[Progress] = []
    for item in progress:
        if run and (item.phase, item.label) != (run[-1].phase, run[-1].label):
            run = []
        run.append(item)
    return run if run and attempt.moment(run[-1].line) > moment - REACH else []


def _advances_behind(attempt: Attempt, run: Sequence[Progress], moment: float) -> bool:
    """Whether a run advances after `moment`; one count is not enough, as a bar is drawn once more at the end."""
    return len({item.count for item in run if attempt.moment(item.line) > moment}) >= LEAST_COUNTS


def _is_of_several(timeline: RankTimeline) -> bool:
    """Whether several ranks print lines without a rank, so that the same count is often repeated at once."""
    counted = [(item.phase, item.label, item.count) for item in timeline.counted]
    again = sum(item == other for item, other in pairwise(counted))
    return again >= 3 and again * 3 > len(counted)
