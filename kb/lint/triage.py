"""Rules for triage files: each is about a symptom, in both languages, and can be followed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from kb.content.facets import Symptom
from kb.content.languages import CHINESE
from kb.content.roots import Root
from kb.content.triage import Observation, read_triage, triage_files
from kb.errors import ContentError
from kb.lint.rule import Violation

TRIAGE = "triage"
REQUIREMENTS = {
    TRIAGE: "A triage is about a symptom, in both languages; an observation separates, and points to entries.",
}


def violations(roots: Iterable[Root], ids: Set[str]) -> Iterator[Violation]:
    """The violations of every triage file; `ids` are the ids of all entries."""
    for path in (path for root in roots for path in triage_files(root)):
        try:
            observations = read_triage(path)
        except ContentError as problem:
            yield Violation(path, problem.line, problem.rule, problem.detail)
            continue
        for message in (*_of_file(path), *(each for one in observations for each in _of_observation(one, ids))):
            yield Violation(path, 1, TRIAGE, message)


def _of_file(path: Path) -> Iterator[str]:
    if path.stem not in list(Symptom):
        yield f"{path.stem} is no symptom: one of {', '.join(Symptom)}"


def _of_observation(observation: Observation, ids: Set[str]) -> Iterator[str]:
    subject = repr(observation.ask)
    outcomes = observation.outcome
    if not observation.command.strip():
        yield f"{subject} has no command"
    if len(outcomes) < 2:
        yield f"{subject} has fewer than two outcomes: it separates nothing"
    for chinese in (observation.ask_zh, observation.where_zh, *(outcome.seen_zh for outcome in outcomes)):
        if not CHINESE.search(chinese):
            yield f"{subject}: {chinese!r} is not Chinese"
    for english in (observation.ask, observation.where, *(outcome.seen for outcome in outcomes)):
        if not english.strip() or CHINESE.search(english):
            yield f"{subject}: {english!r} is not English"
    for unknown in sorted({entry for outcome in outcomes for entry in outcome.points_to} - ids):
        yield f"{subject} points to {unknown}, which is no entry"
