"""Rules for the glossary: short words of the field, in small groups, each word in only one of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kb.content.languages import CHINESE
from kb.lint.rule import Remark
from kb.search.synonyms import Key, key_of

MOST_IN_GROUP = 16
MOST_WORDS = 4
MOST_IDEOGRAPHS = 8
UNREADABLE = "unreadable-glossary"
READING_RULES = {UNREADABLE: "The glossary is TOML with one key, groups, a list of lists of words."}


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the glossary: its line, and the terms by which it is looked up."""

    text: str
    group: int
    line: int
    key: Key


@dataclass(frozen=True, slots=True)
class GlossaryFile:
    """A glossary to check. The line of a group is the line of its first word."""

    groups: tuple[tuple[Word, ...], ...]

    def words(self) -> Iterator[Word]:
        return (word for group in self.groups for word in group)


GlossaryRule = Callable[[GlossaryFile], Iterator[Remark]]


def parse_glossary(source: str) -> GlossaryFile:
    """Parse the text of a glossary. Raises `ValueError` if it is not a glossary."""
    document = tomllib.loads(source)
    groups: Any = document.get("groups")
    if set(document) != {"groups"} or not _are_words(groups):
        raise ValueError("the only key must be groups, a list of lists of words")
    at = 0
    result = []
    for number, group in enumerate(groups):
        words = []
        for text in group:
            at = max(at, source.find(json.dumps(text, ensure_ascii=False), at))  # in the order of the text
            words.append(Word(text, number, source.count("\n", 0, at) + 1, key_of(text)))
        result.append(tuple(words))
    return GlossaryFile(tuple(result))


def _are_words(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, list) and group and all(isinstance(word, str) for word in group) for group in groups
    )


def glossary_word_twice(file: GlossaryFile) -> Iterator[Remark]:
    """No word of the glossary is listed twice, nor two with the same terms in the index, such as save and saved."""
    seen: dict[Key, Word] = {}
    for word in file.words():
        first = seen.setdefault(word.key, word)
        if first is not word and word.key:
            yield word.line, f"{word.text!r} has the same terms as {first.text!r} in line {first.line}"


def glossary_language(file: GlossaryFile) -> Iterator[Remark]:
    """Every group of the glossary has an English word."""
    for group in file.groups:
        if all(CHINESE.search(word.text) for word in group):
            yield group[0].line, f"the group of {group[0].text!r} has no English word"


def glossary_group_size(file: GlossaryFile) -> Iterator[Remark]:
    """A group of the glossary has two to sixteen words."""
    for group in file.groups:
        if not 1 < len(group) <= MOST_IN_GROUP:
            yield group[0].line, f"the group of {group[0].text!r} has {len(group)} words, not 2 to {MOST_IN_GROUP}"


def glossary_stop_word(file: GlossaryFile) -> Iterator[Remark]:
    """No word of the glossary consists only of stop words, which a search ignores."""
    for word in file.words():
        if not word.key:
            yield word.line, f"{word.text!r} consists only of stop words"


def glossary_long_word(file: GlossaryFile) -> Iterator[Remark]:
    """A word of the glossary has at most four English words or eight Chinese characters: it is not a sentence."""
    for word in file.words():
        if len(word.text.split()) > MOST_WORDS or len(CHINESE.findall(word.text)) > MOST_IDEOGRAPHS:
            yield word.line, f"{word.text!r} is too long: nobody searches for the same sentence"


RULES: tuple[GlossaryRule, ...] = (
    glossary_word_twice,
    glossary_language,
    glossary_group_size,
    glossary_stop_word,
    glossary_long_word,
)
