"""Whether the best hit is an answer: how likely it is that its entry is about the question.

    probability = 1 / (1 + exp(-(BIAS + LEAD x lead + WORDING x wording + AGREEMENT x agreement)))

The score of a hit says which entry is nearest, not how near: any question has a nearest entry. Three observations tell:
- lead: how far the best is ahead of the entries that follow. A question about something else is a little like many.
- wording: the share of the question's pairs of words that the entry has as pairs. A pasted message has a place in an
  entry about it; the same words apart from each other prove nothing.
- agreement: how many symptoms, phases and components the question names that the entry declares, less the others.

The weights are those of a logistic regression, `make decision`, with the probability as it was measured with 179
entries: the more entries there are, the nearer is the next one, and the smaller the lead of a right one.
docs/benchmarks.md has the figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import islice, pairwise
from math import exp
from typing import NamedTuple

from kb.search.cues import agreement
from kb.search.index import Index
from kb.search.query import Unit

BIAS, LEAD, WORDING, AGREEMENT = -3.3, 6.8, 2.46, 0.21
LIKELY = 0.55  # from here on a hit is an answer: at 0.5 a fourth of what no entry covers would have one
FOLLOWING = 5  # hits after the best that count for its lead
MOST_PAIRS = 200


class Kind(StrEnum):
    """What a search has to say."""

    ANSWER = "answer"  # an entry is about the question
    RELATED = "related"  # none is; some are near
    UNKNOWN = "unknown"  # nothing is near


class Observations(NamedTuple):
    """What speaks for the best hit. `lead` and `wording` are shares, `agreement` is a number of facet values."""

    lead: float
    wording: float
    agreement: int

    @property
    def probability(self) -> float:
        evidence = LEAD * self.lead + WORDING * self.wording + AGREEMENT * self.agreement
        return 1 / (1 + exp(-(BIAS + evidence)))


def observe(
    index: Index, units: Sequence[Unit], named: int, ranked: Sequence[int], scores: Mapping[int, float]
) -> Observations:
    """Of a question and the numbers of its hits, best first; `named` are the facets that it names."""
    best = ranked[0]
    return Observations(
        lead=lead([scores[number] for number in unrelated(index, ranked)]),
        wording=wording(index, units, best),
        agreement=agreement(named, index.declared[best]),
    )


def unrelated(index: Index, ranked: Sequence[int]) -> list[int]:
    """The hits without those that cause the best, or that it causes: both explain the same failure."""
    best = index.ids[ranked[0]]
    linked = {other for edge in index.causes if best in edge for other in edge} - {best}
    return [number for number in ranked if index.ids[number] not in linked]


def lead(scores: Sequence[float]) -> float:
    """1 without a rival, 0 when those that follow are as good."""
    return 1 - sum(scores[1 : 1 + FOLLOWING]) / FOLLOWING / scores[0]


def wording(index: Index, units: Sequence[Unit], number: int) -> float:
    """The share of pairs, weighted by how rare their words are, that the document has as pairs."""
    pairs = dict.fromkeys(pair for neighbours in pairwise(units) if (pair := _pair(*neighbours)))
    weights = {pair: sum(map(index.idf, pair)) for pair in islice(pairs, MOST_PAIRS)}
    found = sum(weight for pair, weight in weights.items() if index.follows(*pair, number))
    return found / (sum(weights.values()) or 1.0)


def _pair(first: Unit, second: Unit) -> tuple[str, str] | None:
    """The last word of one and the first of the other; None for numbers, which differ from run to run."""
    words = first.words[-1:] + second.words[:1]
    return (words[0], words[1]) if len(words) == 2 and not any(map(str.isdigit, words)) else None
