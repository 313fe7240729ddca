"""Scores entries for a query. Pure except for reading the index.

    score = (sum over concepts of the best alternative's BM25F x weight) x coverage x agreement + signature

A concept scores an entry by the BM25F of its best alternative. `coverage` grows with the share of the query's
information that an entry accounts for, so that an entry with every word of a question beats one that repeats a single
word. `agreement` lowers the score a little if the entry declares other symptoms, phases and components than the
question names. If a pasted log line matches an entry's signature, the entry gains a fixed share of the best text score,
more for `root` than for `cascade`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from heapq import nlargest
from typing import NamedTuple

from kb.search.cues import agreement
from kb.search.index import Index
from kb.search.query import LONGEST_TEXT, MOST_CONCEPTS, Alternative, Concept

SIGNATURE = {"root": 1.0, "cascade": 0.5}
PER_FACET = 0.05  # added for each facet value that both have, subtracted for each that the entry does not declare
LEAST_COVERAGE = 0.7  # the factor for an entry that covers nothing but one common word
MOST_PER_IDF = 3.8  # the text score per idf that counts as likeness 1: nine of ten right entries stay below it
MOST_TRIED = 4 * MOST_CONCEPTS  # a phrase may be in no entry although its words are
MOST_CANDIDATES = 500  # entries; this many are always scored
MOST_CHAMPIONS = 300

Scores = dict[int, float]  # by document number


class ScoredConcept(NamedTuple):
    """A concept's score per document, and the unweighted scores of each of its alternatives."""

    concept: Concept
    idf: float
    scores: Scores
    parts: tuple[tuple[Alternative, Scores], ...]


class Scoring(NamedTuple):
    """A query's scores per document, in parts and in total.

    `signatures` has (role, pattern) by entry id, `unknown` is the number of concepts that no document has, and `named`
    are the facets that the query names.
    """

    concepts: list[ScoredConcept]
    unknown: int
    named: int
    coverage: Scores
    agreement: Scores
    signatures: dict[str, tuple[str, str]]
    lifts: Scores
    totals: Scores


def score_query(index: Index, query: list[Concept], facets: int, text: str, passing: frozenset[int] | None) -> Scoring:
    """Score every document, or in a large index those `passing` a filter; `facets` are those that the text names."""
    scored = score_concepts(index, query, passing)
    covered = coverage(scored)
    agreed = {number: 1 + PER_FACET * agreement(facets, index.declared[number]) for number in covered}
    totals = total_scores(scored, {number: factor * agreed[number] for number, factor in covered.items()})
    signatures = _matching_signatures(index, text[:LONGEST_TEXT])
    lifts = _lifts(index, signatures, max(totals.values(), default=1.0))
    for number, lift in lifts.items():
        totals[number] = totals.get(number, 0.0) + lift
    unknown = min(len(query), MOST_CONCEPTS) - len(scored)
    return Scoring(scored, unknown, facets, covered, agreed, signatures, lifts, totals)


def score_concepts(
    index: Index, concepts: Iterable[Concept], passing: frozenset[int] | None = None
) -> list[ScoredConcept]:
    """Score the concepts that tell entries apart, rarest first; of a long log only the rarest ones.

    In an index of more than `MOST_CANDIDATES` entries only the candidates, or the entries `passing` a filter, are
    scored.
    """
    rarest_first = sorted(concepts, key=lambda concept: -_idf(index, concept))[:MOST_TRIED]
    among = None
    if len(index) > MOST_CANDIDATES:
        among = _candidates(index, rarest_first) if passing is None else passing
    scored: list[ScoredConcept] = []
    for concept in rarest_first:
        candidate = _score(index, concept, among)
        if candidate.scores:
            scored.append(candidate)
        if len(scored) == MOST_CONCEPTS:
            break
    return scored


def coverage(scored: Iterable[ScoredConcept]) -> Scores:
    """The factor for the share of the query's information that a document accounts for, up to 1."""
    scored = list(scored)
    everything = sum(concept.idf for concept in scored) or 1.0
    covered: Scores = {}
    for concept in scored:
        for number in concept.scores:
            covered[number] = covered.get(number, 0.0) + concept.idf
    return {number: LEAST_COVERAGE + (1 - LEAST_COVERAGE) * idf / everything for number, idf in covered.items()}


def total_scores(scored: Iterable[ScoredConcept], factors: Mapping[int, float]) -> Scores:
    """The sum of the scores of all concepts, times the factor of the document."""
    totals: Scores = {}
    for concept in scored:
        _add(totals, concept.scores)
    return {number: total * factors[number] for number, total in totals.items()}


def best_numbers(index: Index, scores: Mapping[int, float], numbers: Collection[int], count: int) -> list[int]:
    """The numbers with the highest scores, best first; equal ones in the order of their ids."""
    least = min(nlargest(count, map(scores.__getitem__, numbers)), default=0.0)
    among = (number for number in numbers if scores[number] >= least)
    return sorted(among, key=lambda number: (-scores[number], index.ids[number]))[:count]


def _score(index: Index, concept: Concept, among: frozenset[int] | None) -> ScoredConcept:
    """Score a concept in every document, or only in those `among`."""
    parts = tuple((alternative, index.scores(alternative.terms, among)) for alternative in concept.alternatives)
    best = _best_alternatives(parts)
    return ScoredConcept(concept, _idf(index, concept) if best else 0.0, best, parts)


def _idf(index: Index, concept: Concept) -> float:
    """The idf of the form that the user wrote; of the other forms if no entry has that one."""
    for alternatives in (concept.alternatives[:1], concept.alternatives[1:]):
        known = [index.idf(term) for alternative in alternatives for term in alternative.terms if index.has(term)]
        if known:
            return max(known)
    return 0.0


def _best_alternatives(parts: Iterable[tuple[Alternative, Mapping[int, float]]]) -> Scores:
    best: Scores = {}
    for alternative, scores in parts:
        for number, score in scores.items():
            weighted = score * alternative.weight
            if weighted > best.get(number, 0.0):
                best[number] = weighted
    return best


def _candidates(index: Index, rarest_first: list[Concept]) -> frozenset[int]:
    """The entries worth scoring in a large index: the best ones if each word counts only for its champions.

    Champions are the `MOST_CHAMPIONS` entries that score highest for one alternative. A candidate gets the same score
    as in a full scoring, but an entry that is not a champion of any word is passed over, so the ranking can differ.
    With 10,000 entries and 300 questions, the first hit differed for one question, one of the first three hits for ten.
    """
    sums: Scores = {}
    for concept in rarest_first[:MOST_CONCEPTS]:
        parts = (
            (alternative, index.champions(alternative.terms, MOST_CHAMPIONS)) for alternative in concept.alternatives
        )
        _add(sums, _best_alternatives(parts))
    return frozenset(best_numbers(index, sums, sums, MOST_CANDIDATES))


def _add(sums: Scores, scores: Mapping[int, float]) -> None:
    for number, score in scores.items():
        sums[number] = sums.get(number, 0.0) + score


def _lifts(index: Index, signatures: dict[str, tuple[str, str]], best: float) -> Scores:
    """What a matching signature adds to the score of its entry."""
    return {
        number: SIGNATURE[signatures[entry_id][0]] * best
        for number, entry_id in index.numbers.items()
        if entry_id in signatures
    }


def _matching_signatures(index: Index, text: str) -> dict[str, tuple[str, str]]:
    """The strongest matching signature of each entry: (role, pattern)."""
    signatures = index.signatures_in(text)
    if not signatures:
        return {}
    from kb.patterns.literals import find  # most questions contain no literal of any signature

    strongest: dict[str, tuple[str, str]] = {}
    for signature in signatures:
        entry_id, role, pattern = signature["id"], signature["role"], signature["pattern"]
        if role == "context" or strongest.get(entry_id, ("",))[0] == "root":
            continue
        if find(pattern, text):
            strongest[entry_id] = (role, pattern)
    return strongest
