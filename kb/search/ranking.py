"""Query and index to ranked hits, each with the reason it matched. Pure but for reading the index.

score = (sum over concepts of the best alternative's BM25F x weight) x coverage + signature

`coverage` grows with the share of the query's information that an entry accounts for, so that an entry
with every word of a question beats one that has a single word often. A pasted log line that matches an
entry's signature lifts that entry by a fixed share of the best text score: root more than cascade.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from heapq import nlargest
from typing import Any, NamedTuple

from kb.content.applicability import Applicability, State, Versions, applicability
from kb.content.filters import Filter
from kb.patterns.literals import find
from kb.search.explanation import Explanation, Factor, phrase
from kb.search.index import Index
from kb.search.query import LONGEST_TEXT, MOST_CONCEPTS, Alternative, Concept, concepts
from kb.search.results import Answer, Hit, is_good, snippet
from kb.search.spelling import corrected

LEAST_COVERAGE = 0.7  # what is left of the score of an entry that covers nothing but one common word
SIGNATURE = {"root": 1.0, "cascade": 0.5}
MOST_HITS = 50
MOST_RIVALS = 20  # hits that a preference may reorder; hardly a question has as many that score half of the best
RELEVANT = 0.5  # of the best score: what has less is no answer to prefer because it applies
MOST_TRIED = 4 * MOST_CONCEPTS  # a phrase may be in no entry although its words are
MOST_CANDIDATES = 500  # entries; so many are always scored
MOST_CHAMPIONS = 300
MOST_PER_IDF = 3.8  # the text score per idf that counts as likeness 1: nine of ten right entries stay below it
EVERYTHING = Filter()

Preference = Callable[[Sequence[Hit]], Sequence[Hit]]  # the same hits in another order


class _Scored(NamedTuple):
    """A concept's score per document, and what each of its alternatives gives before it is weighted."""

    concept: Concept
    idf: float
    scores: dict[int, float]
    parts: tuple[tuple[Alternative, dict[int, float]], ...]


class _Scoring(NamedTuple):
    """What a question gives each document, in parts and in total. `signatures` are (role, pattern) per entry id;
    `unknown` is how many of its concepts no document has.
    """

    concepts: list[_Scored]
    unknown: int
    coverage: dict[int, float]
    signatures: dict[str, tuple[str, str]]
    lifts: dict[int, float]
    totals: dict[int, float]


def search(
    index: Index,
    text: str,
    limit: int = 10,
    *,
    only: Filter = EVERYTHING,
    installed: Versions | None = None,
    preference: Preference | None = None,
    explain: bool = False,
) -> Answer:
    """The entries that answer a question or a pasted log. No hit is an answer, not an error.

    A filter takes hits away and changes no score. With the versions that are `installed`, of the hits that score at
    least half as much as the best, those that apply come first and those that do not come last. A `preference` may
    bring up hits from beyond `limit`. Raises `UsageError` for a filter that no entry can pass.
    """
    wanted, did_you_mean = corrected(index, text, concepts(text, index.has, index.synonyms))
    passing = frozenset(only.admitted(index.facets)) if only else None
    scoring = _scoring(index, wanted, text, passing)
    admitted = scoring.totals.keys() & (index.numbers.keys() if passing is None else passing)
    judged = {} if installed is None else _judged(index, admitted, installed)
    shown = min(max(limit, MOST_RIVALS) if preference else limit, MOST_HITS)
    ranked = _best(index, scoring.totals, admitted, len(admitted) if judged else shown)
    least = RELEVANT * max(scoring.totals.values(), default=0.0)
    relevant = [number for number in ranked if scoring.totals[number] >= least]
    ranked = [*sorted(relevant, key=lambda number: _standing(judged, number)), *ranked[len(relevant) :]][:shown]
    hits = [_hit(index.document(number), number, scoring) for number in ranked]
    if judged:
        hits = [replace(hit, applicability=judged[number]) for hit, number in zip(hits, ranked, strict=True)]
    if explain:
        hits = [replace(hit, why=_explanation(scoring, number)) for hit, number in zip(hits, ranked, strict=True)]
    preferred = preference(hits)[:limit] if preference else hits
    return Answer(text, tuple(preferred), did_you_mean, _is_answered(index, scoring, admitted))


def likeness(index: Index, text: str) -> dict[str, float]:
    """How much of what a text says each entry says too, from 0 to about 1: its text score beside the usual most."""
    scored = _informative(index, concepts(text, index.has, index.synonyms))
    most = sum(one.idf for one in scored) * MOST_PER_IDF or 1.0
    totals = _totals(scored, _coverage(scored))
    return {entry: totals[number] / most for number, entry in index.numbers.items() if number in totals}


def _scoring(index: Index, asked: list[Concept], text: str, passing: frozenset[int] | None) -> _Scoring:
    scored = _informative(index, asked, passing)
    coverage = _coverage(scored)
    totals = _totals(scored, coverage)
    signatures = _signatures(index, text[:LONGEST_TEXT])
    lifts = _lifts(index, signatures, max(totals.values(), default=1.0))
    for number, lift in lifts.items():
        totals[number] = totals.get(number, 0.0) + lift
    unknown = min(len(asked), MOST_CONCEPTS) - len(scored)
    return _Scoring(scored, unknown, coverage, signatures, lifts, totals)


def _is_answered(index: Index, scoring: _Scoring, admitted: Collection[int]) -> bool:
    best = next(iter(_best(index, scoring.totals, admitted, 1)), None)
    if best is None or best in scoring.lifts:
        return best is not None
    rarest = index.idf("")
    asked = sum(concept.idf for concept in scoring.concepts) + max(0, scoring.unknown) * rarest
    covered = sum(concept.idf for concept in scoring.concepts if best in concept.scores)
    return is_good(scoring.totals[best] / (rarest * MOST_PER_IDF), covered / asked)


def _score(index: Index, concept: Concept, among: frozenset[int] | None) -> _Scored:
    """Every document's best alternative of one concept; of some documents only when they are named."""
    parts = tuple((alternative, index.scores(alternative.terms, among)) for alternative in concept.alternatives)
    best = _best_alternative(parts)
    return _Scored(concept, _idf(index, concept) if best else 0.0, best, parts)


def _idf(index: Index, concept: Concept) -> float:
    """Of the form that the user wrote; of the forms that are known when no entry has that one."""
    for alternatives in (concept.alternatives[:1], concept.alternatives[1:]):
        known = [index.idf(term) for alternative in alternatives for term in alternative.terms if index.has(term)]
        if known:
            return max(known)
    return 0.0


def _best_alternative(parts: Iterable[tuple[Alternative, Mapping[int, float]]]) -> dict[int, float]:
    best: dict[int, float] = {}
    for alternative, found in parts:
        for number, score in found.items():
            weighted = score * alternative.weight
            if weighted > best.get(number, 0.0):
                best[number] = weighted
    return best


def _informative(index: Index, asked: Iterable[Concept], passing: frozenset[int] | None = None) -> list[_Scored]:
    """The concepts that tell entries apart, rarest first: of a long log, the rarest ones the index knows.

    An index of more than `MOST_CANDIDATES` entries is scored for its candidates, or for the entries that pass a filter.
    """
    rarest_first = sorted(asked, key=lambda one: -_idf(index, one))[:MOST_TRIED]
    among = None
    if len(index) > MOST_CANDIDATES:
        among = _candidates(index, rarest_first) if passing is None else passing
    scored: list[_Scored] = []
    for concept in rarest_first:
        one = _score(index, concept, among)
        if one.scores:
            scored.append(one)
        if len(scored) == MOST_CONCEPTS:
            break
    return scored


def _candidates(index: Index, rarest_first: list[Concept]) -> frozenset[int]:
    """The entries that are worth scoring in a large index: the best when each word counts for its champions alone.

    Champions are the `MOST_CHAMPIONS` entries that score highest for one alternative. Those chosen get what they would
    get in a full scoring; an entry that is no champion of any word is passed over, and the ranking can differ. With
    10,000 entries and 300 questions the first answer differed for one, one of the first three for ten.
    """
    sums: dict[int, float] = {}
    for concept in rarest_first[:MOST_CONCEPTS]:
        parts = (
            (alternative, index.champions(alternative.terms, MOST_CHAMPIONS)) for alternative in concept.alternatives
        )
        _add(sums, _best_alternative(parts))
    return frozenset(_best(index, sums, sums, MOST_CANDIDATES))


def _best(index: Index, scores: Mapping[int, float], numbers: Collection[int], count: int) -> list[int]:
    """The numbers with the highest scores, best first; of equal ones the lower id first."""
    least = min(nlargest(count, map(scores.__getitem__, numbers)), default=0.0)
    among = (number for number in numbers if scores[number] >= least)
    return sorted(among, key=lambda number: (-scores[number], index.ids[number]))[:count]


def _add(sums: dict[int, float], scores: Mapping[int, float]) -> None:
    for number, score in scores.items():
        sums[number] = sums.get(number, 0.0) + score


def _coverage(scored: list[_Scored]) -> dict[int, float]:
    """The factor for the share of the query's information that a document accounts for: up to 1."""
    everything = sum(one.idf for one in scored) or 1.0
    covered: dict[int, float] = {}
    for one in scored:
        for number in one.scores:
            covered[number] = covered.get(number, 0.0) + one.idf
    return {number: LEAST_COVERAGE + (1 - LEAST_COVERAGE) * idf / everything for number, idf in covered.items()}


def _totals(scored: list[_Scored], coverage: dict[int, float]) -> dict[int, float]:
    totals: dict[int, float] = {}
    for one in scored:
        _add(totals, one.scores)
    return {number: total * coverage[number] for number, total in totals.items()}


def _lifts(index: Index, signatures: dict[str, tuple[str, str]], best: float) -> dict[int, float]:
    """What a matching signature adds to the score of its entry."""
    return {
        number: SIGNATURE[signatures[entry_id][0]] * best
        for number, entry_id in index.numbers.items()
        if entry_id in signatures
    }


def _explanation(scoring: _Scoring, number: int) -> Explanation:
    factors = [_factor(concept, number) for concept in scoring.concepts if number in concept.scores]
    return Explanation(tuple(factors), scoring.coverage.get(number, 0.0), scoring.lifts.get(number, 0.0))


def _factor(one: _Scored, number: int) -> Factor:
    """The alternative that won."""
    found = [(alternative, scores[number]) for alternative, scores in one.parts if number in scores]
    (terms, weight), bm25 = max(found, key=lambda pair: pair[1] * pair[0].weight)
    return Factor(one.concept.surface, phrase(terms), one.idf, weight, bm25, one.scores[number])


def _judged(index: Index, numbers: Set[int], installed: Versions) -> dict[int, Applicability]:
    facets = ((number, index.facets[number]) for number in numbers)
    return {number: applicability(one["applies_to"], one["fixed_in"], installed) for number, one in facets}


def _standing(judged: Mapping[int, Applicability], number: int) -> int:
    return tuple(State).index(judged[number].state) if judged else 0


def _signatures(index: Index, text: str) -> dict[str, tuple[str, str]]:
    """Per entry the strongest signature that matches: (role, pattern)."""
    found: dict[str, tuple[str, str]] = {}
    for one in index.signatures_in(text):
        if one["role"] == "context" or found.get(one["id"], ("",))[0] == "root":
            continue
        if find(one["pattern"], text):
            found[one["id"]] = (one["role"], one["pattern"])
    return found


def _hit(document: dict[str, Any], number: int, scoring: _Scoring) -> Hit:
    matched = tuple(concept.concept.surface for concept in scoring.concepts if number in concept.scores)
    return Hit(
        id=document["id"],
        title=document["title"],
        title_zh=document["title_zh"],
        cause=document["cause"],
        cause_zh=document["cause_zh"],
        status=document["status"],
        severity=document["severity"],
        area=document["area"],
        tags=tuple(document["tags"]),
        frameworks=tuple(document["frameworks"]),
        origin=document["origin"],
        probe=document["probe"],
        score=round(scoring.totals[number], 3),
        matched=matched,
        signature=scoring.signatures.get(document["id"], ("", ""))[1],
        snippet=snippet(document["lines"], matched),
    )
