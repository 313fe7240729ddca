"""Finds the facets that a question names, by the words in `cues.toml`."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from kb.search.query import Unit
from kb.search.synonyms import Key, key_of

FILE = Path(__file__).with_name("cues.toml")
Cues = Mapping[Key, int]  # from the terms of a word to the facet values that it names, as `kb.content.facets.bits`


def read(path: Path = FILE) -> dict[str, dict[str, list[str]]]:
    """The words of each value of each facet, as written."""
    document: dict[str, dict[str, list[str]]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return document


def cues() -> dict[Key, int]:
    """The table of cues that the index stores."""
    from kb.content.facets import bits  # a search reads the table from the index

    table: dict[Key, int] = {}
    for facet, values in read().items():
        for value, words in values.items():
            for key in map(key_of, words):
                table[key] = table.get(key, 0) | bits([f"{facet}:{value}"])
    return table


def out_of_scope() -> int:
    """The values that are subjects kb is not about; a search reads them from the index too."""
    from kb.content.facets import Subject, bits

    return bits(f"subjects:{subject}" for subject in Subject)


def named(units: Sequence[Unit], table: Cues) -> int:
    """The facet values that these units name, one by one or several as a phrase."""
    longest = max(map(len, table), default=0)
    values = 0
    for at in range(len(units)):
        for key in _keys(units[at : at + longest]):
            values |= table.get(key, 0)
    return values


def agreement(named: int, declared: int) -> int:
    """How many of the facet values in a question an entry declares, minus the number that it does not declare.

    0 for an entry that declares none, since it may be older than facets.
    """
    return (named & declared).bit_count() - (named & ~declared).bit_count() if declared else 0


def _keys(units: Sequence[Unit]) -> Iterator[Key]:
    """The keys by which the table may know the first of these units, and phrases that begin with it."""
    yield from ((form,) for form in units[0].forms)
    key: Key = ()
    for unit in units:
        key += unit.words
        yield key
