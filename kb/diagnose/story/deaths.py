"""Finds ranks that ended without a traceback: by a signal or with an exit code."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kb.diagnose.story.endings import ABORT, FATAL, Ending
from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.timeline import Attempt
from kb.harness.collective import name_ranks

RAISED = 1  # exit code of a Python process after an exception, whose traceback may name no rank
LONGEST_REMARK = 120  # characters


def killed_ranks(attempt: Attempt) -> Iterator[Fact]:
    """Facts about ranks that were ended by a signal that no launcher sends to stop them."""
    gave_up = _gave_up(attempt)
    for rank, ending in attempt.endings.by_rank.items():
        failure = attempt.failures.get(rank)
        has_aborted = ending.code == ABORT and not failure and not attempt.endings.has_aborted_waiting
        if (ending.code not in FATAL and not has_aborted) or _is_cleanup(attempt, ending, gave_up):
            continue
        timeline = attempt.timelines.get(rank)
        last = f", last progress: {timeline.progress[-1].text}" if timeline and timeline.progress else ""
        oom = ", the kernel reports an oom kill" if attempt.endings.oom_kills else ""
        traceback = "" if failure else " without a traceback"
        text = f"rank {rank} ended by {ending.text}{traceback}{last}{oom}"
        kernel = (line.evidence for line in attempt.endings.oom_kills[:1])
        yield Fact.of(FactKind.KILLED, text, (rank,), *kernel, ending.line.evidence)


def _gave_up(attempt: Attempt) -> dict[int, float]:
    """When the last two ranks that waited until a timeout gave up."""
    failures = attempt.failures.items() if attempt.is_ordered else ()
    waiting = ((rank, failure) for rank, failure in failures if failure.has_waited and not failure.has_lost)
    latest = sorted((attempt.moment(failure.last), rank) for rank, failure in waiting)[-2:]
    return {rank: moment for moment, rank in latest}  # the last rank is compared with the one before it


def _is_cleanup(attempt: Attempt, ending: Ending, gave_up: Mapping[int, float]) -> bool:
    """Whether others had waited until a timeout before: had the rank been dead then, they would have lost it."""
    moments = [moment for rank, moment in gave_up.items() if rank != ending.rank]
    return bool(moments) and max(moments) < attempt.moment(ending.line)


def exited_ranks(attempt: Attempt) -> Iterator[Fact]:
    """Facts about ranks that ended with an exit code, with what they printed last."""
    for rank, ending in attempt.endings.by_rank.items():
        if ending.code <= 0 or rank in attempt.failures:
            continue
        if ending.code == RAISED and (not ending.is_first or attempt.anonymous_failures):
            continue
        timeline = attempt.timelines.get(rank)
        remark = attempt.endings.errors.get(rank) or (timeline.remark if timeline else None)
        last = f', its last message: "{remark.message[:LONGEST_REMARK]}"' if remark else ""
        text = f"rank {rank} ended with exit code {ending.code} and without a traceback{last}"
        yield Fact.of(FactKind.EXIT, text, (rank,), ending.line.evidence, *((remark.evidence,) if remark else ()))


def first_ending(attempt: Attempt) -> Iterator[Fact]:
    """Which rank the launcher saw end first; among waiting ranks, that is chance."""
    if ending := next((ending for ending in attempt.endings.by_rank.values() if ending.is_first), None):
        text = f"the launcher saw rank {ending.rank} end first ({ending.text})"
        yield Fact.of(FactKind.LAUNCHER, text, (ending.rank,), ending.line.evidence)


def describe_endings(attempt: Attempt) -> str:
    """How an attempt ended, in a few words."""
    own = [(rank, failure) for rank, failure in attempt.failures.items() if not failure.has_waited]
    if own:
        rank, failure = own[0]
        return f"{failure.error.split(':')[0]} on {name_ranks([rank])}"
    killed = [ending for ending in attempt.endings.by_rank.values() if ending.code in FATAL]
    if killed:
        return _ending(killed[0])
    if attempt.failures or attempt.anonymous_failures:
        return "ranks that waited or lost others"
    others = [ending for ending in attempt.endings.by_rank.values() if ending.code]
    return _ending(others[0]) if others else "no failure"


def _ending(ending: Ending) -> str:
    return f"{ending.text} on rank {ending.rank}"
