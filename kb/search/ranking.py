"""Ranks the hits of a query, each with the reason it matched. Pure except for reading the index.

text -> units -> concepts -> scores (`kb.search.scoring`) -> hits, and what they are (`kb.search.decision`)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kb.content.applicability import Applicability, State, Versions, applicability
from kb.content.languages import CHINESE
from kb.search.cues import named
from kb.search.decision import Kind, Observations, decide, nearest, observe
from kb.search.explanation import Explanation, Factor, phrase
from kb.search.index import Index
from kb.search.query import Concept, concepts, joined_bigrams, units_of
from kb.search.results import Answer, Difference, Hit, snippet
from kb.search.scoring import (
    MOST_PER_IDF,
    ScoredConcept,
    Scoring,
    best_numbers,
    coverage,
    score_concepts,
    score_query,
    total_scores,
)
from kb.search.spelling import corrected

if TYPE_CHECKING:  # only a search with a filter needs it
    from kb.content.filters import Filter

MOST_HITS = 50
MOST_RIVALS = 20  # hits that a preference may reorder; few questions have this many with half of the best score
RELEVANT = 0.5  # of the best score: an entry below it does not move up because it applies
MOST_LACKING = 4  # words to show
NUMBER = re.compile(r"[\d.:,-]+")

Preference = Callable[[Sequence[Hit]], Sequence[Hit]]  # the same hits in another order


def search(
    index: Index,
    text: str,
    limit: int = 10,
    *,
    only: Filter | None = None,
    installed: Versions | None = None,
    preference: Preference | None = None,
    explain: bool = False,
) -> Answer:
    """The entries that answer a question or a pasted log. An answer without hits is not an error.

    A filter removes hits but changes no score. If versions are `installed`, then among the hits that score at least
    half as much as the best, those that apply come first and those that do not apply come last. A `preference` may
    bring up hits from beyond `limit`. Raises `UsageError` for a filter that no entry can pass.
    """
    units = units_of(text)
    query, did_you_mean = corrected(index, text, concepts(units, index.has, index.synonyms))
    passing = frozenset(only.admitted(index.facets)) if only else None
    scoring = score_query(index, query, named(units, index.cues), text, passing)
    admitted = scoring.totals.keys() & (index.numbers.keys() if passing is None else passing)
    judgements = {} if installed is None else _judgements(index, admitted, installed)
    count = min(max(limit, MOST_RIVALS) if preference else limit, MOST_HITS)
    ranked = best_numbers(index, scoring.totals, admitted, len(admitted) if judgements else count)
    least = RELEVANT * max(scoring.totals.values(), default=0.0)
    relevant = [number for number in ranked if scoring.totals[number] >= least]
    relevant.sort(key=lambda number: _order(judgements, number))
    ranked = [*relevant, *ranked[len(relevant) :]][:count]
    hits = [_hit(index.document(number), number, scoring, text) for number in ranked]
    if judgements:
        hits = [replace(hit, applicability=judgements[number]) for hit, number in zip(hits, ranked, strict=True)]
    if explain:
        hits = [replace(hit, why=_explanation(scoring, number)) for hit, number in zip(hits, ranked, strict=True)]
    decision = decide(index, units, scoring, admitted)
    if decision.kind is not Kind.ANSWER:
        differences = (_difference(index, query, scoring, number, text) for number in ranked)
        hits = [replace(hit, difference=difference) for hit, difference in zip(hits, differences, strict=True)]
    preferred = preference(hits)[:limit] if preference else hits
    is_about_something = decision.kind is not Kind.UNKNOWN or decision.is_vague  # "cook rice" is not "cool roce"
    return Answer(
        query=text,
        hits=tuple(preferred),
        did_you_mean=did_you_mean if is_about_something else "",
        kind=decision.kind,
        probability=round(decision.probability, 3),
        is_vague=decision.is_vague,
        facets=() if decision.kind is Kind.ANSWER else _facets(scoring),
    )


def likeness(index: Index, text: str) -> dict[str, float]:
    """How much of a text's content each entry shares, from 0 to about 1: its text score over the usual maximum."""
    scored = score_concepts(index, concepts(units_of(text), index.has, index.synonyms))
    most = sum(concept.idf for concept in scored) * MOST_PER_IDF or 1.0
    totals = total_scores(scored, coverage(scored))
    return {entry: totals[number] / most for number, entry in index.numbers.items() if number in totals}


def observations(index: Index, text: str) -> tuple[str, Observations] | None:
    """The nearest entry and the observations about it; None if nothing matches. `make decision` fits them."""
    units = units_of(text)
    query, _ = corrected(index, text, concepts(units, index.has, index.synonyms))
    scoring = score_query(index, query, named(units, index.cues), text, None)
    ranked = nearest(index, scoring, index.numbers)
    return (index.ids[ranked[0]], observe(index, units, scoring.named, ranked, scoring.totals)) if ranked else None


def _facets(scoring: Scoring) -> tuple[str, ...]:
    from kb.content.facets import values_of  # not needed for an answer

    return tuple(values_of(scoring.named))


def _difference(index: Index, query: list[Concept], scoring: Scoring, number: int, text: str) -> Difference:
    """How an entry differs from the question, rarest words first.

    A word that no entry has is the rarest, but counts only if it looks like a name.
    """
    from kb.content.facets import values_of  # not needed for an answer

    idf = {scored.concept.surface: scored.idf for scored in scoring.concepts}
    has = {scored.concept.surface for scored in scoring.concepts if number in scored.scores}
    words = [word for word in dict.fromkeys(concept.surface for concept in query) if word not in has]
    words = [word for word in words if word in idf or not (word.isascii() and word.islower() and word.isalpha())]
    lacks = sorted(
        (word for word in words if not NUMBER.fullmatch(word)), key=lambda word: -idf.get(word, index.idf(""))
    )
    lacks = joined_bigrams(lacks, text, lambda _: True)
    return Difference(tuple(lacks[:MOST_LACKING]), tuple(values_of(scoring.named & ~index.declared[number])))


def _explanation(scoring: Scoring, number: int) -> Explanation:
    factors = [_factor(concept, number) for concept in scoring.concepts if number in concept.scores]
    return Explanation(
        tuple(factors),
        scoring.coverage.get(number, 0.0),
        scoring.agreement.get(number, 1.0),
        scoring.lifts.get(number, 0.0),
    )


def _factor(scored: ScoredConcept, number: int) -> Factor:
    """The alternative that scored highest."""
    rivals = [(alternative, scores[number]) for alternative, scores in scored.parts if number in scores]
    (terms, weight), bm25 = max(rivals, key=lambda pair: pair[1] * pair[0].weight)
    return Factor(scored.concept.surface, phrase(terms), scored.idf, weight, bm25, scored.scores[number])


def _judgements(index: Index, numbers: Set[int], installed: Versions) -> dict[int, Applicability]:
    facets = ((number, index.facets[number]) for number in numbers)
    return {number: applicability(row["applies_to"], row["fixed_in"], installed) for number, row in facets}


def _order(judgements: Mapping[int, Applicability], number: int) -> int:
    """The place in the order: entries that apply first, entries that do not apply last."""
    return tuple(State).index(judgements[number].state) if judgements else 0


def _hit(document: dict[str, Any], number: int, scoring: Scoring, text: str) -> Hit:
    words = [concept.concept.surface for concept in scoring.concepts if number in concept.scores]
    lines, in_chinese = document["lines"], CHINESE.search(text) is not None
    matched = joined_bigrams(words, text, lambda word: any(word in line for line in lines)) if in_chinese else words
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
        matched=tuple(matched),
        signature=scoring.signatures.get(document["id"], ("", ""))[1],
        snippet=snippet(lines, words, in_chinese=in_chinese),
    )
