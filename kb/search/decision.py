"""Decides whether the best hit is an answer: the probability that its entry is about the question.

    probability = 1 / (1 + exp(-(BIAS + LEAD x lead + WORDING x wording + AGREEMENT x agreement)))

The score of a hit says which entry is nearest, but not how near: every question has a nearest entry. Three observations
say how near it is:
- lead: how far the best hit is ahead of the next ones. A question about something else resembles many entries a little.
- wording: the share of the question's pairs of words that the entry has as pairs. A pasted message occurs in an entry
  about it; the same words apart from each other prove nothing.
- agreement: how many of the symptoms, phases and components in the question the entry declares, minus the others.

Whatever they say, there is no answer if the entry has little of the question's text (`is_near`) or only common words of
it (`are_common`), nor to a question about a subject outside kb.

The weights are from a logistic regression, `make decision`, and the probability was measured with 179 entries: the more
entries there are, the nearer is the next one, and the smaller the lead of the right one. docs/benchmarks.md has the
figures.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import islice, pairwise
from math import exp
from typing import NamedTuple

from kb.search.cues import agreement
from kb.search.index import Index
from kb.search.query import Unit
from kb.search.scoring import MOST_PER_IDF, Scoring, best_numbers

BIAS, LEAD, WORDING, AGREEMENT = -3.3, 6.8, 2.46, 0.21
LIKELY = 0.55  # least probability of an answer; at 0.5, 1 of 4 questions that no entry covers would get one
FOLLOWING = 5  # hits after the best that count for its lead
MOST_PAIRS = 200
MOST_UNKNOWN = 0.1  # highest probability if nothing is near: a single word may put an entry far ahead
ALL, RARE = 0.999, 0.75  # an entry with all words of a question is related if one has this share of the highest idf
NEAR, NEAR_FOR_ALL = 1.75, 0.8  # in rare words; see `is_near`
COMMON = 2.6  # see `are_common`
SURE = 0.9  # at or above this, common words suffice for an answer: "too many open files"


class Kind(StrEnum):
    """What a search has to say."""

    ANSWER = "answer"  # an entry is about the question
    RELATED = "related"  # none is, but some are near
    UNKNOWN = "unknown"  # nothing is near, or too much


class Observations(NamedTuple):
    """The observations about the best hit. `lead` and `wording` are shares, `agreement` is a number of facet values."""

    lead: float
    wording: float
    agreement: int

    @property
    def probability(self) -> float:
        evidence = LEAD * self.lead + WORDING * self.wording + AGREEMENT * self.agreement
        return 1 / (1 + exp(-(BIAS + evidence)))


class Decision(NamedTuple):
    """What the best hit is, and how likely it is an answer. `is_vague`: the question has only common words."""

    kind: Kind
    probability: float
    is_vague: bool = False


def decide(index: Index, units: list[Unit], scoring: Scoring, admitted: Collection[int]) -> Decision:
    """Decide on the best of the `admitted` hits, before any preference reorders them."""
    ranked = nearest(index, scoring, admitted)
    if not ranked:
        return Decision(Kind.UNKNOWN, 0.0)
    has_signature = ranked[0] in scoring.lifts
    if scoring.named & index.out_of_scope and not has_signature:
        return Decision(Kind.UNKNOWN, MOST_UNKNOWN)  # as 11 of 640 questions do; no entry is about any
    rarest = index.idf("")
    everything = sum(concept.idf for concept in scoring.concepts) + max(0, scoring.unknown) * rarest
    shared = [concept.idf for concept in scoring.concepts if ranked[0] in concept.scores]
    share = sum(shared) / everything if everything else 0.0
    probability = observe(index, units, scoring.named, ranked, scoring.totals).probability
    vague = are_common(shared) and probability < SURE
    if has_signature or (not vague and is_near(scoring.totals[ranked[0]] / (rarest * MOST_PER_IDF), share)):
        return Decision(Kind.ANSWER if probability >= LIKELY else Kind.RELATED, probability)
    has_rare = any(concept.idf >= RARE * rarest for concept in scoring.concepts)
    kind = Kind.RELATED if share >= ALL and has_rare else Kind.UNKNOWN
    return Decision(kind, min(probability, MOST_UNKNOWN), is_vague=vague and share >= ALL)


def nearest(index: Index, scoring: Scoring, admitted: Collection[int]) -> list[int]:
    """The best hits, as many as a decision needs."""
    return best_numbers(index, scoring.totals, scoring.totals.keys() & admitted, 2 * FOLLOWING)


def observe(
    index: Index, units: Sequence[Unit], named: int, ranked: Sequence[int], scores: Mapping[int, float]
) -> Observations:
    """The observations about the best of the `ranked` hits; `named` are the facets that the question names."""
    best = ranked[0]
    return Observations(
        lead=lead([scores[number] for number in unrelated(index, ranked)]),
        wording=wording(index, units, best),
        agreement=agreement(named, index.declared[best]),
    )


def is_near(rare_words: float, share: float) -> bool:
    """Whether a hit that is not an answer is about something near, instead of just having some words in common.

    `rare_words` is its text score, counted in words that no other entry has. `share` is how much of the question's
    information the entry accounts for, where a word that no entry has counts as rare. Either the text score alone is
    high enough, or a lower one covers most of a short question. Of 198 questions about anything else (other software,
    the weather, nonsense) 10 % pass, of 60 written afterwards 8 %.
    """
    return rare_words >= NEAR or rare_words * share >= NEAR_FOR_ALL


def are_common(idfs: Iterable[float]) -> bool:
    """Whether a question and an entry share only common words: "my job hangs", "CUDA out of memory".

    `idfs` are the idfs of the shared words. A word that all entries have counts 0, one that half of them have 0.7, one
    that no other has 4.5. With common words, the nearest entry is whichever repeats them most, so it has to be far
    ahead.
    """
    return sum(idf - 1 for idf in idfs) < COMMON


def unrelated(index: Index, ranked: Sequence[int]) -> list[int]:
    """The hits without those that cause the best one or follow from it, since both explain the same failure."""
    best = index.ids[ranked[0]]
    linked = {other for edge in index.causes if best in edge for other in edge} - {best}
    return [number for number in ranked if index.ids[number] not in linked]


def lead(scores: Sequence[float]) -> float:
    """The lead of the best score: 1 without a rival, 0 if the next ones are as good."""
    return 1 - sum(scores[1 : 1 + FOLLOWING]) / FOLLOWING / scores[0]


def wording(index: Index, units: Sequence[Unit], number: int) -> float:
    """The share of pairs of words that the document has as pairs, weighted by how rare the words are."""
    pairs = dict.fromkeys(pair for neighbours in pairwise(units) if (pair := _pair(*neighbours)))
    weights = {pair: sum(map(index.idf, pair)) for pair in islice(pairs, MOST_PAIRS)}
    found = sum(weight for pair, weight in weights.items() if index.follows(*pair, number))
    return found / (sum(weights.values()) or 1.0)


def _pair(first: Unit, second: Unit) -> tuple[str, str] | None:
    """The last word of one and the first word of the other; None for numbers, which differ from run to run."""
    words = first.words[-1:] + second.words[:1]
    return (words[0], words[1]) if len(words) == 2 and not any(map(str.isdigit, words)) else None
