"""Synonyms of the field, English and Chinese, from `synonyms.toml`.

They are applied to queries. The index stores the table only so that a search need not read the file again.
"""

from __future__ import annotations

import tomllib
from pathlib import Path

from kb.search.tokenizer import terms, words

FILE = Path(__file__).with_name("synonyms.toml")
Key = tuple[str, ...]


def read(path: Path = FILE) -> list[list[str]]:
    """The groups as written."""
    groups: list[list[str]] = tomllib.loads(path.read_text(encoding="utf-8"))["groups"]
    return groups


def synonyms() -> dict[Key, tuple[Key, ...]]:
    """For each word or phrase of the glossary, the other words of its group, all as terms."""
    return table(read())


def table(groups: list[list[str]]) -> dict[Key, tuple[Key, ...]]:
    """The same as `synonyms`, for any groups."""
    related: dict[Key, dict[Key, None]] = {}
    for group in groups:
        keys = list(dict.fromkeys(key_of(word) for word in group))
        for key in keys:
            related.setdefault(key, {}).update((other, None) for other in keys if other != key)
    return {key: tuple(others) for key, others in related.items()}


def key_of(word: str) -> Key:
    """The terms of the words, one by one for an identifier; every bigram of a Chinese word."""
    key: list[str] = []
    seen = set()
    for term in terms(word):
        if term.is_cjk or term.surface.startswith("-"):  # an exit code
            key += [term.text] if term.is_cjk or term.run not in seen else []
        elif term.run not in seen:
            key += words(term.surface)
        seen.add(term.run)
    return tuple(key)
