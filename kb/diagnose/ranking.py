"""Sightings to findings, best first: causes before what they cause, what was printed before what merely reads alike.

score = strength of the strongest signature, shared among the entries that claim the same lines
      + a little for every further signature, less for context
      + likeness of the log to the entry's text (kb.search), up to `LIKENESS`

An entry that is seen and is caused by another that is seen as a root is a cascade of it and stands below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from kb.diagnose.evidence import Line, Sighting
from kb.diagnose.failure_lines import is_launcher

STRENGTH = {"root": 1.0, "cascade": 0.45, "last": 0.4}
FURTHER = {"root": 0.2, "cascade": 0.08, "last": 0.2, "context": 0.12}
MOST_FURTHER = 3
SHARING = 0.5
UNDER_ROOT, UNDER_CASCADE = 0.5, 0.8
AT_MOST = 0.95  # of its cause's score
LAUNCHED = 0.4  # weight of what a launcher prints of any rank that ended
LIKENESS = 0.5
MOST_FINDINGS = 10
LEAST_LIKE = 0.35  # likeness that makes an entry without a signature a finding at all

Edge = tuple[str, str]
Place = tuple[str, int | str, str]
Claims = dict[Place, set[str]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that the evidence speaks for. `role` is root, cascade, or similar where only the wording fits."""

    id: str
    role: str
    score: float
    likeness: float
    sightings: tuple[Sighting, ...]
    caused_by: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for sighting in self.sightings for line in sighting.lines)


def rank(
    sightings: Iterable[Sighting], likeness: Mapping[str, float], causes: Sequence[Edge], masks: Sequence[Edge]
) -> tuple[Candidate, ...]:
    """Candidates, best first. `likeness` is 0 to 1 per entry; `causes` (cause, effect) and `masks` (seen, hidden)."""
    by_entry: dict[str, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        by_entry[sighting.id].append(sighting)
    claims = _claims(by_entry)
    maybe = (_candidate(entry, some, likeness.get(entry, 0.0), claims) for entry, some in by_entry.items())
    found = [one for one in maybe if one is not None]
    seen = {one.id: one.role for one in found}
    found = _below([_placed(one, seen, causes, masks) for one in found])
    alike = [
        Candidate(entry, "similar", LIKENESS * like, like, tuple(by_entry.get(entry, ())))
        for entry, like in likeness.items()
        if entry not in seen and like >= LEAST_LIKE
    ]
    return tuple(sorted([*found, *alike], key=lambda one: (-one.score, one.id))[:MOST_FINDINGS])


def _below(found: list[Candidate]) -> list[Candidate]:
    """No consequence above the best of its causes."""
    scores = {one.id: one.score for one in found}
    most = {one.id: AT_MOST * max((scores[by] for by in one.caused_by), default=one.score / AT_MOST) for one in found}
    return [replace(one, score=min(one.score, most[one.id])) for one in found]


def _claims(by_entry: Mapping[str, list[Sighting]]) -> Claims:
    """For each line of evidence and role, the entries that have a signature on it."""
    claims: Claims = defaultdict(set)
    for entry, seen in by_entry.items():
        for sighting in seen:
            claims[_place(sighting)].add(entry)
    return claims


def _place(sighting: Sighting) -> Place:
    line = sighting.lines[0]
    return line.source, line.number or line.text, sighting.role


def _candidate(entry: str, seen: list[Sighting], likeness: float, claims: Claims) -> Candidate | None:
    strengths = [
        (_strength(sighting) / len(claims[_place(sighting)]) ** SHARING, sighting.role, _place(sighting))
        for sighting in seen
        if sighting.role in STRENGTH
    ]
    if not strengths:
        return None
    strength, role, place = max(strengths, key=lambda strength: strength[:2])
    others = (one for one in seen if _place(one) != place and not is_launcher(one.lines[0].text))
    further = sorted((FURTHER[other.role] for other in others), reverse=True)
    score = strength + sum(further[:MOST_FURTHER]) + LIKENESS * likeness
    shared_with = tuple(sorted(claims[place] - {entry}))
    return Candidate(entry, role, score, likeness, tuple(seen), shared_with=shared_with)


def _strength(sighting: Sighting) -> float:
    weight = LAUNCHED if sighting.role == "cascade" and is_launcher(sighting.lines[0].text) else 1.0
    return STRENGTH[sighting.role] * weight


def _placed(one: Candidate, seen: Mapping[str, str], causes: Sequence[Edge], masks: Sequence[Edge]) -> Candidate:
    """Below what leads to it, or what it hides, where that is seen as a root, or is no more than a cascade either."""
    above = {cause for cause, effect in causes if effect == one.id} | {hidden for it, hidden in masks if it == one.id}
    below = {effect for cause, effect in causes if cause == one.id}
    by = tuple(sorted(other for other in above - below - {one.id} if seen.get(other) == "root"))
    if by:
        return replace(one, role="cascade", score=one.score * UNDER_ROOT, caused_by=by)
    if one.role == "cascade" and any(seen.get(other) == "cascade" for other in above - below):
        return replace(one, score=one.score * UNDER_CASCADE)
    return one
