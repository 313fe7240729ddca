"""Finds words of a question that no entry has, and the spelling that was probably meant."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kb.search.index import Index
from kb.search.query import Alternative, Concept
from kb.search.tokenizer import SEPARATORS, normal

A_QUESTION = 200  # characters; a longer text was pasted, and its unknown words are names rather than slips
CORRECTION_WEIGHT = 0.8
MOST_SPELLINGS = 2
MOST_SLIPS = 10  # a question with more unknown words is in a language that no entry uses
WORD = re.compile(r"[A-Za-z0-9]+")  # ends where Chinese begins, which `\b` would not do

Corrections = dict[str, tuple[str, ...]]  # an unknown word in lower case, to the nearest terms, best first


def corrected(index: Index, text: str, asked: Iterable[Concept]) -> tuple[list[Concept], str]:
    """The concepts of a question, with the nearest spelling of each unknown word as an alternative, and the question
    with corrected spelling, or "" if nothing changes.
    """
    concepts = list(asked)
    if len(text) > A_QUESTION:
        return concepts, ""
    unknown = dict.fromkeys(word for concept in concepts for word in _unknown(index, concept))
    if not 0 < len(unknown) <= MOST_SLIPS:
        return concepts, ""
    spellings = _spellings(index, {word[0] for word in unknown})
    nearest = {word: _nearest(index, word, spellings[word[0]]) for word in unknown}
    return [_with_spellings(concept, nearest) for concept in concepts], _respelled(index, text, nearest)


def _unknown(index: Index, concept: Concept) -> Iterator[str]:
    """The words, or words of an identifier, that neither an entry nor the glossary has."""
    for word in _words(concept.surface):
        is_a_word = word.isascii() and word.isalpha() and 3 < len(word) < 25
        if is_a_word and not index.has(normal(word)) and (normal(word),) not in index.synonyms:
            yield word


def _words(surface: str) -> list[str]:
    return [word for piece in surface.lower().split() for word in SEPARATORS.split(piece)]


def _spellings(index: Index, letters: set[str]) -> dict[str, list[tuple[str, list[str]]]]:
    """Terms with their spellings, by first letter, which is rarely wrong and leaves few spellings to compare."""
    by_letter: dict[str, list[tuple[str, list[str]]]] = {letter: [] for letter in letters}
    for term, spellings in index.surfaces.items():
        if term[0] in letters:
            by_letter[term[0]].append((term, spellings))
    return by_letter


def _nearest(index: Index, word: str, spellings: list[tuple[str, list[str]]]) -> tuple[str, ...]:
    """The terms with the spelling nearest to the word, if it is near enough; most common first."""
    most = 1 if len(word) < 6 else 2
    distances = {term: min(distance(word, spelling, most) for spelling in some) for term, some in spellings}
    least = min(distances.values(), default=most + 1)
    near = sorted((term for term, edits in distances.items() if edits == least <= most), key=index.idf)
    return tuple(near[:MOST_SPELLINGS])


def distance(word: str, other: str, most: int) -> int:
    """The edits between two words, where a transposition is one edit; `most + 1` for anything beyond `most`."""
    if abs(len(word) - len(other)) > most or len(set(word) ^ set(other)) > 2 * most:
        return most + 1
    before: list[int] = []
    last = list(range(len(other) + 1))
    for i, a in enumerate(word, 1):
        row = [i]
        for j, b in enumerate(other, 1):
            cost = min(last[j] + 1, row[j - 1] + 1, last[j - 1] + (a != b))
            if i > 1 < j and a == other[j - 2] and b == word[i - 2]:
                cost = min(cost, before[j - 2] + 1)
            row.append(cost)
        before, last = last, row
    return min(last[-1], most + 1)


def _with_spellings(concept: Concept, nearest: Corrections) -> Concept:
    near = [term for word in _words(concept.surface) for term in nearest.get(word, ())]
    spellings = (Alternative((term,), CORRECTION_WEIGHT) for term in near)
    return Concept(concept.surface, (*spellings, *concept.alternatives)) if near else concept


def _respelled(index: Index, text: str, nearest: Corrections) -> str:
    """The text with its unknown words respelled and nothing else changed; "" if there are none."""
    spelt = {
        word: min(index.surfaces[near[0]], key=lambda spelling: distance(word, spelling, len(word)))
        for word, near in nearest.items()
        if near
    }
    respelled = WORD.sub(lambda match: spelt.get(match.group().lower(), match.group()), text)
    return "" if respelled == text else respelled
