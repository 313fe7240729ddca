"""Query and index to ranked hits, each with the reason it matched. Pure but for reading the index.

score = (sum over concepts of the best alternative's BM25F x weight) x coverage x agreement + signature

`agreement` takes a little off an entry that declares other symptoms, phases and components than the question names.
A pasted log line that matches an entry's signature lifts that entry by a fixed share of the best text score: `root`
more than `cascade`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kb.content.applicability import Applicability, State, Versions, applicability
from kb.content.languages import CHINESE
from kb.search.cues import agreement, named
from kb.search.decision import FOLLOWING, LIKELY, Kind, Observations, observe
from kb.search.explanation import Explanation, Factor, phrase
from kb.search.index import Index
from kb.search.query import LONGEST_TEXT, MOST_CONCEPTS, Concept, Unit, concepts, joined_bigrams, units_of
from kb.search.results import Answer, Difference, Hit, is_near, is_vague, snippet
from kb.search.scoring import ScoredConcept, Scores, best_numbers, coverage, score_concepts, total_scores
from kb.search.spelling import corrected

if TYPE_CHECKING:  # only a search with a filter pays for it
    from kb.content.filters import Filter

SIGNATURE = {"root": 1.0, "cascade": 0.5}
MOST_HITS = 50
MOST_RIVALS = 20  # hits that a preference may reorder; hardly a question has as many that score half of the best
PER_FACET = 0.05  # what a facet that both name adds to the score, and one that the entry does not declare takes off
RELEVANT = 0.5  # of the best score: an entry with less is not preferred for applying
ALL, RARE = 0.999, 0.75  # an entry with all words of a question is related if one is as rare as this, of the rarest
MOST_UNKNOWN = 0.1  # probability of an answer where nothing is near: one word of a question may be far ahead alone
SURE = 0.9  # and an answer to a question of common words: "too many open files"
MOST_LACKING = 4  # words that are shown
NUMBER = re.compile(r"[\d.:,-]+")
MOST_PER_IDF = 3.8  # the text score per idf that counts as likeness 1: nine of ten right entries stay below it

Preference = Callable[[Sequence[Hit]], Sequence[Hit]]  # the same hits in another order


class _Scoring(NamedTuple):
    """A query's scores per document, in parts and in total. `signatures` are (role, pattern) per entry id; `unknown` is
    how many of its concepts no document has; `named` are the facets that it names.
    """

    concepts: list[ScoredConcept]
    unknown: int
    named: int
    coverage: Scores
    agreement: Scores
    signatures: dict[str, tuple[str, str]]
    lifts: Scores
    totals: Scores


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
    """The entries that answer a question or a pasted log. No hit is an answer, not an error.

    A filter takes hits away and changes no score. With the versions that are `installed`, of the hits that score at
    least half as much as the best, those that apply come first and those that do not come last. A `preference` may
    bring up hits from beyond `limit`. Raises `UsageError` for a filter that no entry can pass.
    """
    units = units_of(text)
    query, did_you_mean = corrected(index, text, concepts(units, index.has, index.synonyms))
    passing = frozenset(only.admitted(index.facets)) if only else None
    scoring = _scoring(index, query, named(units, index.cues), text, passing)
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
    kind, probability = _decision(index, units, scoring, admitted)
    if kind is not Kind.ANSWER:
        differences = (_difference(index, query, scoring, number, text) for number in ranked)
        hits = [replace(hit, difference=difference) for hit, difference in zip(hits, differences, strict=True)]
    preferred = preference(hits)[:limit] if preference else hits
    facets = () if kind is Kind.ANSWER else _facets(scoring)
    return Answer(text, tuple(preferred), did_you_mean, kind, round(probability, 3), facets)


def likeness(index: Index, text: str) -> dict[str, float]:
    """How much of a text's content each entry shares, from 0 to about 1: its text score over the usual maximum."""
    scored = score_concepts(index, concepts(units_of(text), index.has, index.synonyms))
    most = sum(concept.idf for concept in scored) * MOST_PER_IDF or 1.0
    totals = total_scores(scored, coverage(scored))
    return {entry: totals[number] / most for number, entry in index.numbers.items() if number in totals}


def _scoring(index: Index, query: list[Concept], facets: int, text: str, passing: frozenset[int] | None) -> _Scoring:
    scored = score_concepts(index, query, passing)
    covered = coverage(scored)
    agreed = {number: 1 + PER_FACET * agreement(facets, index.declared[number]) for number in covered}
    totals = total_scores(scored, {number: factor * agreed[number] for number, factor in covered.items()})
    signatures = _matching_signatures(index, text[:LONGEST_TEXT])
    lifts = _lifts(index, signatures, max(totals.values(), default=1.0))
    for number, lift in lifts.items():
        totals[number] = totals.get(number, 0.0) + lift
    unknown = min(len(query), MOST_CONCEPTS) - len(scored)
    return _Scoring(scored, unknown, facets, covered, agreed, signatures, lifts, totals)


def observations(index: Index, text: str) -> tuple[str, Observations] | None:
    """The entry that comes nearest, and what speaks for it; None when nothing matches. `make decision` fits these."""
    units = units_of(text)
    query, _ = corrected(index, text, concepts(units, index.has, index.synonyms))
    scoring = _scoring(index, query, named(units, index.cues), text, None)
    ranked = _nearest(index, scoring, index.numbers)
    return (index.ids[ranked[0]], observe(index, units, scoring.named, ranked, scoring.totals)) if ranked else None


def _nearest(index: Index, scoring: _Scoring, admitted: Collection[int]) -> list[int]:
    """Enough of the hits for a decision."""
    return best_numbers(index, scoring.totals, scoring.totals.keys() & admitted, 2 * FOLLOWING)


def _decision(index: Index, units: list[Unit], scoring: _Scoring, admitted: Collection[int]) -> tuple[Kind, float]:
    """What the best hit is, and how likely it is an answer."""
    ranked = _nearest(index, scoring, admitted)
    if not ranked:
        return Kind.UNKNOWN, 0.0
    if scoring.named & index.out_of_scope and ranked[0] not in scoring.lifts:
        return Kind.UNKNOWN, MOST_UNKNOWN  # of 640 questions 11 name such a subject, and no entry is about any
    rarest = index.idf("")
    everything = sum(concept.idf for concept in scoring.concepts) + max(0, scoring.unknown) * rarest
    shared = [concept.idf for concept in scoring.concepts if ranked[0] in concept.scores]
    probability = observe(index, units, scoring.named, ranked, scoring.totals).probability
    share = sum(shared) / everything if everything else 0.0
    vague = is_vague(shared) and probability < SURE
    near = not vague and is_near(scoring.totals[ranked[0]] / (rarest * MOST_PER_IDF), share)
    if ranked[0] not in scoring.lifts and not near:
        has_rare = any(concept.idf >= RARE * rarest for concept in scoring.concepts)
        return (Kind.RELATED if share >= ALL and has_rare else Kind.UNKNOWN), min(probability, MOST_UNKNOWN)
    return (Kind.ANSWER if probability >= LIKELY else Kind.RELATED), probability


def _facets(scoring: _Scoring) -> tuple[str, ...]:
    from kb.content.facets import values_of  # an answer needs no enumerations

    return tuple(values_of(scoring.named))


def _difference(index: Index, query: list[Concept], scoring: _Scoring, number: int, text: str) -> Difference:
    """The rarest words first: one that no entry has is the rarest, if it is a name and not a word of any language."""
    from kb.content.facets import values_of  # an answer needs no enumerations

    idf = {scored.concept.surface: scored.idf for scored in scoring.concepts}
    has = {scored.concept.surface for scored in scoring.concepts if number in scored.scores}
    words = [word for word in dict.fromkeys(concept.surface for concept in query) if word not in has]
    words = [word for word in words if word in idf or not (word.isascii() and word.islower() and word.isalpha())]
    lacks = sorted(
        (word for word in words if not NUMBER.fullmatch(word)), key=lambda word: -idf.get(word, index.idf(""))
    )
    lacks = joined_bigrams(lacks, text, lambda _: True)
    return Difference(tuple(lacks[:MOST_LACKING]), tuple(values_of(scoring.named & ~index.declared[number])))


def _lifts(index: Index, signatures: dict[str, tuple[str, str]], best: float) -> Scores:
    """What a matching signature adds to the score of its entry."""
    return {
        number: SIGNATURE[signatures[entry_id][0]] * best
        for number, entry_id in index.numbers.items()
        if entry_id in signatures
    }


def _explanation(scoring: _Scoring, number: int) -> Explanation:
    factors = [_factor(concept, number) for concept in scoring.concepts if number in concept.scores]
    return Explanation(
        tuple(factors),
        scoring.coverage.get(number, 0.0),
        scoring.agreement.get(number, 1.0),
        scoring.lifts.get(number, 0.0),
    )


def _factor(scored: ScoredConcept, number: int) -> Factor:
    """The alternative that won."""
    rivals = [(alternative, scores[number]) for alternative, scores in scored.parts if number in scores]
    (terms, weight), bm25 = max(rivals, key=lambda pair: pair[1] * pair[0].weight)
    return Factor(scored.concept.surface, phrase(terms), scored.idf, weight, bm25, scored.scores[number])


def _judgements(index: Index, numbers: Set[int], installed: Versions) -> dict[int, Applicability]:
    facets = ((number, index.facets[number]) for number in numbers)
    return {number: applicability(row["applies_to"], row["fixed_in"], installed) for number, row in facets}


def _order(judgements: Mapping[int, Applicability], number: int) -> int:
    """First what applies, last what does not."""
    return tuple(State).index(judgements[number].state) if judgements else 0


def _matching_signatures(index: Index, text: str) -> dict[str, tuple[str, str]]:
    """Per entry the strongest signature that matches: (role, pattern)."""
    signatures = index.signatures_in(text)
    if not signatures:
        return {}
    from kb.patterns.literals import find  # most questions hold no literal of any signature

    strongest: dict[str, tuple[str, str]] = {}
    for signature in signatures:
        entry_id, role, pattern = signature["id"], signature["role"], signature["pattern"]
        if role == "context" or strongest.get(entry_id, ("",))[0] == "root":
            continue
        if find(pattern, text):
            strongest[entry_id] = (role, pattern)
    return strongest


def _hit(document: dict[str, Any], number: int, scoring: _Scoring, text: str) -> Hit:
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
