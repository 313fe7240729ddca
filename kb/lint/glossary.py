"""Rules of the glossary: words of the field, few and short, each in one group."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kb.lint.rule import CHINESE, Remark
from kb.search.synonyms import Key, key_of

MOST_IN_GROUP = 16
MOST_WORDS = 4
MOST_IDEOGRAPHS = 8
UNREADABLE = "unreadable-glossary"
READING_RULES = {UNREADABLE: "The glossary is TOML with one key, groups, a list of lists of words."}


@dataclass(frozen=True, slots=True)
class Word:
    """One word of the glossary: where it stands, and the terms it is looked up by."""

    text: str
    group: int
    line: int
    key: Key


@dataclass(frozen=True, slots=True)
class GlossaryDraft:
    """A glossary under review. The line of a group is that of its first word."""

    groups: tuple[tuple[Word, ...], ...]

    def words(self) -> Iterator[Word]:
        return (word for group in self.groups for word in group)


GlossaryRule = Callable[[GlossaryDraft], Iterator[Remark]]


def draft(source: str) -> GlossaryDraft:
    """The glossary of a text. Raises `ValueError` when it is none."""
    found = tomllib.loads(source)
    groups: Any = found.get("groups")
    if set(found) != {"groups"} or not _are_words(groups):
        raise ValueError("it holds something else than groups, a list of lists of words")
    at = 0
    result = []
    for number, group in enumerate(groups):
        words = []
        for text in group:
            at = max(at, source.find(json.dumps(text, ensure_ascii=False), at))  # words stand in the text in this order
            words.append(Word(text, number, source.count("\n", 0, at) + 1, key_of(text)))
        result.append(tuple(words))
    return GlossaryDraft(tuple(result))


def _are_words(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, list) and group and all(isinstance(word, str) for word in group) for group in groups
    )


def glossary_word_twice(draft: GlossaryDraft) -> Iterator[Remark]:
    """No word of the glossary stands twice, nor two that the index takes for one, as save and saved."""
    seen: dict[Key, Word] = {}
    for word in draft.words():
        first = seen.setdefault(word.key, word)
        if first is not word and word.key:
            yield word.line, f"{word.text!r} is {first.text!r} of line {first.line}, once analysed"


def glossary_language(draft: GlossaryDraft) -> Iterator[Remark]:
    """Every group of the glossary has an English word."""
    for group in draft.groups:
        if all(CHINESE.search(word.text) for word in group):
            yield group[0].line, f"{group[0].text!r} and the words beside it have no English one"


def glossary_group_size(draft: GlossaryDraft) -> Iterator[Remark]:
    """A group of the glossary has two words at least and sixteen at most."""
    for group in draft.groups:
        if not 1 < len(group) <= MOST_IN_GROUP:
            yield group[0].line, f"{group[0].text!r} is in a group of {len(group)}, 2 to {MOST_IN_GROUP} are useful"


def glossary_stop_word(draft: GlossaryDraft) -> Iterator[Remark]:
    """No word of the glossary consists of stop words alone, which no question is searched for."""
    for word in draft.words():
        if not word.key:
            yield word.line, f"{word.text!r} leaves nothing to search for"


def glossary_long_word(draft: GlossaryDraft) -> Iterator[Remark]:
    """A word of the glossary has at most four English words or eight Chinese characters: it is no sentence."""
    for word in draft.words():
        if len(word.text.split()) > MOST_WORDS or len(CHINESE.findall(word.text)) > MOST_IDEOGRAPHS:
            yield word.line, f"{word.text!r} is a sentence, and nobody asks in the same one"


RULES: tuple[GlossaryRule, ...] = (
    glossary_word_twice,
    glossary_language,
    glossary_group_size,
    glossary_stop_word,
    glossary_long_word,
)
