"""The parts of a hit's score, for a reader who asks why it has its rank.

score = (sum of the factors' scores) x coverage x agreement + signature
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Factor:
    """What one concept of the question gave: score = bm25 x weight.

    `word` is the user's; `term` what the entry has of it: another form, a synonym or a corrected spelling. `idf` is
    how much the concept tells entries apart, in the measure that coverage counts.
    """

    word: str
    term: str
    idf: float
    weight: float
    bm25: float
    score: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The parts of one hit's score. `coverage` and `agreement` are factors, `signature` is what a matching one adds."""

    concepts: tuple[Factor, ...]
    coverage: float
    agreement: float
    signature: float

    @property
    def score(self) -> float:
        """The score of the hit, from its parts."""
        return sum(concept.score for concept in self.concepts) * self.coverage * self.agreement + self.signature


def phrase(terms: tuple[str, ...]) -> str:
    """Terms as a person would write them: Chinese ones overlap by a character."""
    if all(len(term) == 2 and not term.isascii() for term in terms):
        return terms[0] + "".join(term[-1] for term in terms[1:])
    return " ".join(terms)
