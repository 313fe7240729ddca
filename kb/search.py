"""Query and index to ranked hits, each with the reason it matched. Pure but for reading the index.

score = (sum over concepts of the best alternative's BM25F x weight) x coverage + signature

`coverage` grows with the share of the query's information that an entry accounts for, so that an entry
with every word of a question beats one that has a single word often. A pasted log line that matches an
entry's signature lifts that entry by a fixed share of the best text score: root more than cascade.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, NamedTuple

from kb.index import Index
from kb.query import LONGEST_TEXT, MOST_CONCEPTS, Alternative, Concept, concepts
from kb.signature import find

LEAST_COVERAGE = 0.4  # what is left of the score of an entry that covers nothing but one common word
SIGNATURE = {"root": 1.0, "cascade": 0.5}
CORRECTION_WEIGHT = 0.8
MOST_HITS = 50
SNIPPET_LENGTH = 160


@dataclass(frozen=True, slots=True)
class Hit:
    """One entry with a reason. `matched` are the user's words; `signature` the pattern that matched, or ""."""

    id: str
    title: str
    title_zh: str
    cause: str
    cause_zh: str
    status: str
    severity: str
    tags: tuple[str, ...]
    frameworks: tuple[str, ...]
    origin: str
    probe: str | None
    score: float
    matched: tuple[str, ...]
    signature: str
    snippet: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Hits, best first, and a corrected spelling when words of the question are unknown."""

    query: str
    hits: tuple[Hit, ...]
    did_you_mean: str


class _Scored(NamedTuple):
    concept: Concept
    idf: float
    scores: dict[int, float]


def search(index: Index, text: str, limit: int = 10) -> Answer:
    """The entries that answer a question or a pasted log. No hit is an answer, not an error."""
    asked, corrections = _corrected(index, concepts(text, index.has, index.synonyms))
    scored = _informative([_score(index, concept) for concept in asked])
    signatures = _signatures(index, text[:LONGEST_TEXT])
    totals = _totals(scored)
    best = max(totals.values(), default=1.0)
    for number, entry_id in index.numbers.items():
        if entry_id in signatures:
            totals[number] = totals.get(number, 0.0) + SIGNATURE[signatures[entry_id][0]] * best
    ranked = sorted(totals.keys() & index.numbers.keys(), key=lambda number: (-totals[number], number))
    chosen = ranked[: min(limit, MOST_HITS)]
    hits = [_hit(index.document(number), totals[number], number, scored, signatures) for number in chosen]
    return Answer(text, tuple(hits), _respelled(text, corrections))


def _score(index: Index, concept: Concept) -> _Scored:
    """Every document's best alternative of one concept."""
    best: dict[int, float] = {}
    for alternative in concept.alternatives:
        for number, score in index.scores(alternative.terms).items():
            best[number] = max(best.get(number, 0.0), score * alternative.weight)
    known = [index.idf(term) for term in concept.alternatives[0].terms if index.has(term)]
    return _Scored(concept, max(known, default=0.0) if best else 0.0, best)


def _informative(scored: list[_Scored]) -> list[_Scored]:
    """The concepts that tell entries apart: of a long log, the rarest ones the index knows."""
    known = [one for one in scored if one.scores]
    return sorted(known, key=lambda one: -one.idf)[:MOST_CONCEPTS]


def _totals(scored: list[_Scored]) -> dict[int, float]:
    everything = sum(one.idf for one in scored) or 1.0
    totals: dict[int, float] = {}
    covered: dict[int, float] = {}
    for one in scored:
        for number, score in one.scores.items():
            totals[number] = totals.get(number, 0.0) + score
            covered[number] = covered.get(number, 0.0) + one.idf
    share = {number: LEAST_COVERAGE + (1 - LEAST_COVERAGE) * covered[number] / everything for number in totals}
    return {number: total * share[number] for number, total in totals.items()}


def _signatures(index: Index, text: str) -> dict[str, tuple[str, str]]:
    """Per entry the strongest signature that matches: (role, pattern)."""
    lowered = text.lower()
    found: dict[str, tuple[str, str]] = {}
    for one in index.signatures:
        if one["literal"] not in lowered or found.get(one["id"], ("",))[0] == "root":
            continue
        if find(one["pattern"], text):
            found[one["id"]] = (one["role"], one["pattern"])
    return found


def _corrected(index: Index, asked: tuple[Concept, ...]) -> tuple[list[Concept], dict[str, str]]:
    """Words that no entry has get their nearest spelling as an alternative; (concepts, word -> spelling)."""
    result, corrections = [], {}
    for concept in asked:
        word = concept.alternatives[0].terms[0]
        is_unknown = not any(index.has(term) for one in concept.alternatives for term in one.terms)
        near = index.near(word)[:2] if is_unknown and word.isascii() and word.isalpha() and 3 < len(word) < 20 else []
        if near:
            corrections[concept.surface] = index.surfaces.get(near[0], near[0])
            concept = Concept(concept.surface, tuple(Alternative((one,), CORRECTION_WEIGHT) for one in near))
        result.append(concept)
    return result, corrections


def _respelled(text: str, corrections: dict[str, str]) -> str:
    if not corrections or len(text) > 200:
        return ""
    return re.sub("|".join(map(re.escape, corrections)), lambda match: corrections[match.group()], text)


def _hit(
    document: dict[str, Any], score: float, number: int, scored: list[_Scored], signatures: dict[str, tuple[str, str]]
) -> Hit:
    matched = tuple(one.concept.surface for one in scored if number in one.scores)
    return Hit(
        id=document["id"],
        title=document["title"],
        title_zh=document["title_zh"],
        cause=document["cause"],
        cause_zh=document["cause_zh"],
        status=document["status"],
        severity=document["severity"],
        tags=tuple(document["tags"]),
        frameworks=tuple(document["frameworks"]),
        origin=document["origin"],
        probe=document["probe"],
        score=round(score, 3),
        matched=matched,
        signature=signatures.get(document["id"], ("", ""))[1],
        snippet=_snippet(document["lines"], matched),
    )


def _snippet(lines: list[str], matched: tuple[str, ...]) -> str:
    """The stored line with most of the matched words, cut around the first of them."""
    words = [word.lower() for word in matched]

    def found_in(line: str) -> int:
        low = line.lower()
        return sum(word in low for word in words)

    line = max(lines, key=found_in, default="")
    at = min((line.lower().find(word) for word in words if word in line.lower()), default=0)
    start = max(0, at - SNIPPET_LENGTH // 3)
    cut = line[start : start + SNIPPET_LENGTH]
    return f"{'…' if start else ''}{cut}{'…' if start + SNIPPET_LENGTH < len(line) else ''}"
