"""Reads the story of a job: its attempts, and the facts from comparing the ranks of the first attempt."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.clocks import on_one_clock, skew_facts, skews
from kb.diagnose.story.deaths import describe_endings, exited_ranks, first_ending, killed_ranks
from kb.diagnose.story.excerpt import Excerpt
from kb.diagnose.story.fact import EXPLANATIONS, Fact, FactKind
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.places import own_failures, size_mismatches, waiting_places
from kb.diagnose.story.resume import losses_after_resume
from kb.diagnose.story.rows import summarize
from kb.diagnose.story.summary import Story
from kb.diagnose.story.tables import read_tables
from kb.diagnose.story.timeline import Attempt
from kb.diagnose.story.trends import trends
from kb.diagnose.story.waiting import late_ranks, missing_ranks, steps_behind

ENDINGS = (FactKind.KILLED, FactKind.EXIT, FactKind.ALL_LOST)
MOST_FACTS = 12


def read_story(excerpts: Iterable[Excerpt]) -> Story:
    """Read the story from the excerpts of all logs. It works with any log, however damaged."""
    excerpts = list(excerpts)
    is_whole = all(excerpt.has_all_marks for excerpt in excerpts)
    lines = list(read_tables(read_lines(excerpts)))
    ahead = skews(lines)
    attempts = tuple(read_attempts(on_one_clock(lines, ahead)))
    rows = tuple(map(summarize, attempts))
    if not attempts:
        return Story()
    if not attempts[-1].has_failed:
        end = attempts[-1].completion
        facts = tuple(_trends(attempts, attempts[-1]))[:MOST_FACTS]
        survived = {end.source: end.number} if end else {}
        return Story(rows, facts, completion=end and end.evidence, survived=survived)
    facts = (
        *_facts(attempts[0], is_whole=is_whole),
        *_trends(attempts, attempts[0]),
        *first_ending(attempts[0]),
        *_restarts(attempts),
        *skew_facts(lines, ahead),
    )[:MOST_FACTS]
    waiting = frozenset(rank for rank, failure in attempts[0].failures.items() if failure.has_waited)
    return Story(rows, facts, _culprit(attempts[0], facts), waiting, survived=attempts[0].survived_until)


def _culprit(attempt: Attempt, facts: Iterable[Fact]) -> Fact | None:
    """The fact about the first rank that failed by itself.

    An end that only the launcher reports counts only if other ranks waited for that rank or lost it.
    """
    failures = [*attempt.failures.values(), *attempt.anonymous_failures]
    has_waited = any(failure.has_waited for failure in failures)
    own = (fact for fact in facts if fact.kind == FactKind.OWN_FAILURE or (has_waited and fact.kind in ENDINGS))
    return next((fact for fact in own if fact.ranks or fact.kind != FactKind.ALL_LOST), None)


def _facts(attempt: Attempt, *, is_whole: bool) -> Iterator[Fact]:
    """The facts about an attempt, causes before consequences. Only complete logs show that a rank raised nothing."""
    late = list(late_ranks(attempt))
    accused = {rank for fact in late for rank in fact.ranks}
    facts = [
        *own_failures(attempt),
        *late,
        *waiting_places(attempt, accused),
        *size_mismatches(attempt),
        *killed_ranks(attempt),
        *exited_ranks(attempt),
    ]
    if is_whole and not late and not any(fact.kind in EXPLANATIONS for fact in facts):
        facts += missing_ranks(attempt)
    yield from facts
    yield from steps_behind(attempt)


def _trends(attempts: Sequence[Attempt], attempt: Attempt) -> Iterator[Fact]:
    """The facts about metrics. A high loss after a resume does not also count as a jump."""
    resumed = list(losses_after_resume(attempts))
    places = {fact.lines for fact in resumed}
    yield from resumed
    yield from (fact for fact in trends(attempt) if fact.kind != FactKind.JUMP or fact.lines not in places)


def _restarts(attempts: tuple[Attempt, ...]) -> Iterator[Fact]:
    if len(attempts) < 2:
        return
    first, *others = [describe_endings(attempt) for attempt in attempts]
    later = "the same" if set(others) == {first} else ", ".join(others)
    text = f"attempt 1 of {len(attempts)} ended with {first}; later ones with {later}"
    yield Fact.of(FactKind.RESTARTS, text, (), attempts[0].lines[-1].evidence)
