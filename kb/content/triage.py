"""Triage: what to look at when no entry answers. `entries/triage/` has a file for each symptom.

A file lists observations in the order to make them: what to ask, the command that shows it, and what each outcome
points to. Reading it needs neither pydantic nor Markdown, so a search that finds nothing is as quick as any other.
"""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.roots import Root
from kb.errors import ContentError

FOLDER = "triage"
PREFIX = "symptoms:"
COMMONEST = "crash"  # for a question that names no symptom: an error line is a crash
MOST = 3  # observations in an answer: nobody makes more in ten minutes


@dataclass(frozen=True, slots=True)
class Outcome:
    """A possible outcome, and the entries that it points to; none if kb has no entry about it."""

    seen: str
    seen_zh: str
    points_to: tuple[str, ...]

    def to_json(self, *, in_chinese: bool) -> dict[str, Any]:
        return {"seen": self.seen_zh if in_chinese else self.seen, "points_to": self.points_to}


@dataclass(frozen=True, slots=True)
class Observation:
    """A question, the command that answers it, `where` to run the command, and the possible outcomes."""

    ask: str
    ask_zh: str
    command: str
    where: str
    where_zh: str
    outcome: tuple[Outcome, ...]

    def to_json(self, *, in_chinese: bool) -> dict[str, Any]:
        """The observation in one language."""
        return {
            "ask": self.ask_zh if in_chinese else self.ask,
            "command": self.command,
            "where": self.where_zh if in_chinese else self.where,
            "outcomes": [outcome.to_json(in_chinese=in_chinese) for outcome in self.outcome],
        }


Triage = Mapping[str, Sequence[Observation]]  # by symptom


def load_triage(roots: Iterable[Root]) -> dict[str, tuple[Observation, ...]]:
    """The observations by symptom; a later root replaces the file of an earlier one. Raises `ContentError`."""
    return {path.stem: read_triage(path) for root in roots for path in triage_files(root)}


def first_observations(triage: Triage, facets: Collection[str]) -> Sequence[Observation]:
    """What to look at first for a question that names these facets (`symptoms:hang`); nothing if it names none.

    If the question names several symptoms, the first that has observations decides; a crash comes last, since any error
    is a crash.
    """
    named = [facet.removeprefix(PREFIX) for facet in facets if facet.startswith(PREFIX)]
    wanted = [*(symptom for symptom in named if symptom != COMMONEST), COMMONEST]
    return next((triage[symptom][:MOST] for symptom in wanted if facets and symptom in triage), ())


def triage_files(root: Root) -> list[Path]:
    return sorted((root.entries / FOLDER).glob("*.toml"))


def read_triage(path: Path) -> tuple[Observation, ...]:
    """Read the observations in a file. Raises `ContentError` if it is not a triage file."""
    try:
        rows = tomllib.loads(path.read_text(encoding="utf-8"))["observation"]
        return tuple(_observation(row) for row in rows)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ContentError(
            path, 1, "unreadable-triage", f"not a triage: {error}", "see entries/triage/hang.toml"
        ) from None


def _observation(row: dict[str, Any]) -> Observation:
    outcomes = ({**outcome, "points_to": tuple(outcome["points_to"])} for outcome in row["outcome"])
    return Observation(**{**row, "outcome": tuple(Outcome(**outcome) for outcome in outcomes)})
