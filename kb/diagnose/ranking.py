"""Ranks the entries that matched, best first: causes before their consequences, signatures before similar wording.

score = strength of the strongest signature, shared among the entries that claim the same lines
      + a little for each further signature, less for context
      + likeness of the log to the entry's text (kb.search), up to `LIKENESS`

Lines of context are not evidence: they only order entries that have nothing but similar wording.

An entry that matches becomes a cascade of another that causes it and matches as a root, and ranks below it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from kb.diagnose.evidence import Line, SignatureMatch
from kb.diagnose.failure_lines import is_launcher

STRENGTH = {"root": 1.0, "cascade": 0.45, "last": 0.4}
FURTHER = {"root": 0.2, "cascade": 0.08, "last": 0.2, "context": 0.12}
MOST_FURTHER = 3
SHARING = 0.5
UNDER_ROOT, UNDER_CASCADE = 0.5, 0.8
AT_MOST = 0.95  # highest score of a consequence, as a share of its cause's score
FACT = 1.8  # weight of a fact as a cascade: it compares ranks, whereas any waiting rank prints the other cascades
LAUNCHED = 0.4  # weight of a line that a launcher prints for any rank that ended
LIKENESS = 0.5
MOST_FINDINGS = 10
LEAST_LIKE = 0.35  # lowest likeness of a candidate without a matching signature

Edge = tuple[str, str]
Place = tuple[str, int | str, str]
Claims = dict[Place, set[str]]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An entry that the evidence supports. `role` is root, cascade, last, or similar if only the wording fits."""

    id: str
    role: str
    score: float
    likeness: float
    matches: tuple[SignatureMatch, ...]
    caused_by: tuple[str, ...] = ()
    shared_with: tuple[str, ...] = ()

    @property
    def lines(self) -> tuple[Line, ...]:
        return tuple(line for match in self.matches for line in match.lines)


def rank_candidates(
    matches: Iterable[SignatureMatch],
    likeness: Mapping[str, float],
    causes: Sequence[Edge],
    masks: Sequence[Edge],
    facts: Set[str] = frozenset(),
) -> tuple[Candidate, ...]:
    """The candidates, best first.

    `likeness` is 0 to 1 per entry; `causes` are pairs (cause, effect) and `masks` pairs (visible, hidden). `facts` are
    the sentences of the story of the job.
    """
    by_entry: dict[str, list[SignatureMatch]] = defaultdict(list)
    for match in matches:
        by_entry[match.id].append(match)
    claims = _claims(by_entry)
    scored = (_candidate(entry, own, likeness.get(entry, 0.0), claims, facts) for entry, own in by_entry.items())
    matched = [candidate for candidate in scored if candidate is not None]
    roles = {candidate.id: candidate.role for candidate in matched}
    matched = _cap_consequences([_demote(candidate, roles, causes, masks) for candidate in matched])
    similar = [
        _similar(entry, share, by_entry.get(entry, ()))
        for entry, share in likeness.items()
        if entry not in roles and share >= LEAST_LIKE
    ]
    ranked = sorted(
        [*matched, *similar], key=lambda candidate: (candidate.role == "similar", -candidate.score, candidate.id)
    )
    return tuple(ranked[:MOST_FINDINGS])


def _similar(entry: str, likeness: float, context: Sequence[SignatureMatch]) -> Candidate:
    return Candidate(
        entry, "similar", LIKENESS * likeness + FURTHER["context"] * bool(context), likeness, tuple(context)
    )


def _cap_consequences(candidates: list[Candidate]) -> list[Candidate]:
    """Limit the score of each consequence to just below the best of its causes."""
    scores = {candidate.id: candidate.score for candidate in candidates}
    return [
        replace(candidate, score=min(candidate.score, AT_MOST * max(scores[cause] for cause in candidate.caused_by)))
        if candidate.caused_by
        else candidate
        for candidate in candidates
    ]


def _claims(by_entry: Mapping[str, list[SignatureMatch]]) -> Claims:
    """For each line of evidence and role, the entries that have a signature on it."""
    claims: Claims = defaultdict(set)
    for entry, matches in by_entry.items():
        for match in matches:
            claims[_place(match)].add(entry)
    return claims


def _place(match: SignatureMatch) -> Place:
    line = match.lines[0]
    return line.source, line.number or line.text, match.role


def _candidate(
    entry: str, matches: list[SignatureMatch], likeness: float, claims: Claims, facts: Set[str]
) -> Candidate | None:
    strengths = [
        (_strength(match, facts) / len(claims[_place(match)]) ** SHARING, match.role, _place(match))
        for match in matches
        if match.role in STRENGTH
    ]
    if not strengths:
        return None
    strength, role, place = max(strengths, key=lambda strength: strength[:2])
    others = (match for match in matches if _place(match) != place and not is_launcher(match.lines[0].text))
    further = sorted((FURTHER[other.role] for other in others), reverse=True)
    score = strength + sum(further[:MOST_FURTHER]) + LIKENESS * likeness
    shared_with = tuple(sorted(claims[place] - {entry}))
    return Candidate(entry, role, score, likeness, tuple(matches), shared_with=shared_with)


def _strength(match: SignatureMatch, facts: Set[str]) -> float:
    if match.role != "cascade":
        return STRENGTH[match.role]
    if match.lines[0].text in facts:
        return STRENGTH["cascade"] * FACT
    return STRENGTH["cascade"] * (LAUNCHED if is_launcher(match.lines[0].text) else 1.0)


def _demote(candidate: Candidate, roles: Mapping[str, str], causes: Sequence[Edge], masks: Sequence[Edge]) -> Candidate:
    """Rank a candidate below its causes and what it masks, if these match as roots, or as cascades like itself."""
    above = {cause for cause, effect in causes if effect == candidate.id}
    above |= {hidden for visible, hidden in masks if visible == candidate.id}
    above -= {effect for cause, effect in causes if cause == candidate.id}
    caused_by = tuple(sorted(other for other in above - {candidate.id} if roles.get(other) == "root"))
    if caused_by:
        return replace(candidate, role="cascade", score=candidate.score * UNDER_ROOT, caused_by=caused_by)
    if candidate.role == "cascade" and any(roles.get(other) == "cascade" for other in above):
        return replace(candidate, score=candidate.score * UNDER_CASCADE)
    return candidate
