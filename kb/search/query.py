"""Turns what a user typed or pasted into a bounded list of concepts. There are no operators that a text could abuse.

A concept is a word, an identifier or a phrase together with its alternatives (other forms, synonyms). A document is
scored by the best alternative of each concept, so synonyms never add up.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from kb.search.tokenizer import Term, normal, normalized, terms, words

LONGEST_TEXT = 8000  # characters of a query that are used
MOST_UNITS = 2000  # words or Chinese bigrams that are looked up; more than a page has
MOST_CONCEPTS = 24
SYNONYM_WEIGHT = 0.5  # this and the next are cross-validated by tests/bench/tuning.py
WHOLE_WEIGHT = 2.0  # for an identifier as it was written

# Parts of a pasted log that change from run to run: times, addresses, hashes, process ids, long counters, paths.
VOLATILE = r"""(?x)
      \d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d(?:[.,]\d+)?Z?
      | \b\d{1,2}:\d\d:\d\d(?:[.,]\d+)?\b
      | \b0x[0-9a-fA-F]{4,}\b | \b[0-9a-f]{12,}\b
      | \[(?:rank|default)?\d+\]: | \b(?:pid|PID)[=:\ ]+\d+
      | \b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b
      | \bE\d{3,4}\b | \b\d{5,}\b
      | File\ "[^"]*/(?=[^/"]+") | (?<![\w/])/(?:[\w.\-]+/)+
"""
A_QUESTION = 120  # characters; a longer text was pasted


class Alternative(NamedTuple):
    """Terms that stand for a concept: one term, or several as a phrase."""

    terms: tuple[str, ...]
    weight: float


class Concept(NamedTuple):
    """One thing the user named, as they wrote it, and the terms that stand for it."""

    surface: str
    alternatives: tuple[Alternative, ...]


class Unit(NamedTuple):
    """One run of the text: a word or identifier with its forms, or one Chinese bigram."""

    surface: str
    forms: tuple[str, ...]
    is_cjk: bool
    words: tuple[str, ...]  # the terms by which the glossary may know it
    run: int  # the stretch of the text that it is from

    @property
    def is_plain(self) -> bool:
        return len(self.forms) == 1


Synonyms = Mapping[tuple[str, ...], tuple[tuple[str, ...], ...]]


def units_of(text: str) -> list[Unit]:
    """The words, identifiers and Chinese bigrams of a text in order, without what changes from run to run."""
    text = normalized(text[:LONGEST_TEXT])[:LONGEST_TEXT]  # one character may become eighteen
    return _units(text if len(text) <= A_QUESTION else re.sub(VOLATILE, " ", text))[:MOST_UNITS]


def concepts(units: list[Unit], has: Callable[[str], bool], synonyms: Synonyms) -> tuple[Concept, ...]:
    """The distinct concepts of a text in order. `has` says whether a term is in the index."""
    longest = max(map(len, synonyms), default=0)
    distinct: dict[tuple[Alternative, ...], Concept] = {}
    at = 0
    while at < len(units):
        known = _synonym(units[at : at + longest], synonyms) or _joined(units, at, has)
        length, concept = known or (1, _single(units[at]))
        if known or not _is_bridge(units, at, longest, synonyms):
            distinct.setdefault(concept.alternatives, concept)
        at += length
    return tuple(distinct.values())


def joined_bigrams(surfaces: Sequence[str], text: str, stands: Callable[[str], bool]) -> list[str]:
    """Surfaces of a text, with overlapping Chinese ones joined if the longer one `stands` in what is shown.

    A reader knows 利用率, but not its parts 利用 and 用率. The joined surface gets the better rank of its parts.
    """
    ranks: dict[str, int] = {}
    last = ""
    for rank, surface in sorted(enumerate(surfaces), key=lambda ranked: text.find(ranked[1])):
        longer = last + surface[1:]
        if last[-1:] == surface[0] and not surface[0].isascii() and longer in text and stands(longer):
            rank, surface = min(rank, ranks.pop(last)), longer
        ranks[surface] = rank
        last = surface
    return sorted(ranks, key=ranks.__getitem__)


def _is_bridge(units: list[Unit], at: int, longest: int, synonyms: Synonyms) -> bool:
    """Whether a Chinese bigram only joins the end of one word to the beginning of the next, which is known."""
    following = units[at + 1 : at + 1 + longest]
    is_inside = units[at].is_cjk and bool(following) and following[0].is_cjk and following[0].run == units[at].run
    return is_inside and _synonym(following, synonyms) is not None


def _units(text: str) -> list[Unit]:
    runs: dict[int, list[Term]] = {}
    for term in terms(text):
        runs.setdefault(term.run, []).append(term)
    units: list[Unit] = []
    for forms in runs.values():
        if forms[0].is_cjk:
            units += [Unit(term.text, (term.text,), True, (term.text,), term.run) for term in forms]
        else:
            units.append(_word(forms[0].surface, tuple(term.text for term in forms), forms[0].run))
    return units


def _word(surface: str, forms: tuple[str, ...], run: int) -> Unit:
    return Unit(surface, forms, False, forms if len(forms) == 1 else words(surface), run)


def _synonym(units: list[Unit], table: Synonyms) -> tuple[int, Concept] | None:
    """The longest glossary word that begins these units, with its synonyms at a lower weight."""
    for length in range(len(units), 0, -1):
        some = units[:length]
        key = tuple(word for unit in some for word in unit.words)
        if key in table:
            own = _single(some[0]).alternatives if length == 1 else (Alternative(key, 1.0),)
            others = (Alternative(other, SYNONYM_WEIGHT) for other in table[key])
            return length, Concept(_surface(some), (*own, *others))
    return None


def _joined(units: list[Unit], at: int, has: Callable[[str], bool]) -> tuple[int, Concept] | None:
    """Two words that the index has as one: `all gather`, `world size`."""
    some = units[at : at + 2]
    if len(some) < 2 or any(unit.is_cjk or not unit.is_plain or not unit.surface.isalpha() for unit in some):
        return None
    solid = normal(some[0].surface + some[1].surface)
    if not has(solid):
        return None
    phrase = tuple(unit.forms[0] for unit in some)
    return 2, Concept(_surface(some), (Alternative((solid,), 1.0), Alternative(phrase, 1.0)))


def _single(unit: Unit) -> Concept:
    """A word as it is; an identifier as a whole at double weight, and its parts as words."""
    if unit.is_plain:
        return Concept(unit.surface, (Alternative(unit.forms, 1.0),))
    whole, *rest = unit.forms
    return Concept(unit.surface, (Alternative((whole,), WHOLE_WEIGHT), *(Alternative((part,), 1.0) for part in rest)))


def _surface(units: list[Unit]) -> str:
    if units[0].is_cjk:
        return units[0].surface + "".join(unit.surface[-1] for unit in units[1:])
    return " ".join(unit.surface for unit in units)
