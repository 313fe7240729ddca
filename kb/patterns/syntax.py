"""The parse tree of a pattern, as `re` builds it: the kinds of elements, and which characters an element matches."""

from __future__ import annotations

import re
from functools import lru_cache
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

LITERAL, NOT_LITERAL, ANY, IN = _constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN
RANGE, NEGATE = _constants.RANGE, _constants.NEGATE
SUBPATTERN, BRANCH, ATOMIC_GROUP = _constants.SUBPATTERN, _constants.BRANCH, _constants.ATOMIC_GROUP
GROUPREF_EXISTS = _constants.GROUPREF_EXISTS
LOOK_AROUNDS = (_constants.ASSERT, _constants.ASSERT_NOT)
ZERO_WIDTH = (_constants.AT, *LOOK_AROUNDS)
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
UNBOUNDED = _constants.MAXREPEAT
CATEGORIES = {
    _constants.CATEGORY_DIGIT: re.compile(r"\d"),
    _constants.CATEGORY_NOT_DIGIT: re.compile(r"\D"),
    _constants.CATEGORY_SPACE: re.compile(r"\s"),
    _constants.CATEGORY_NOT_SPACE: re.compile(r"\S"),
    _constants.CATEGORY_WORD: re.compile(r"\w"),
    _constants.CATEGORY_NOT_WORD: re.compile(r"\W"),
}


@lru_cache(64)  # several modules look at the patterns of an entry in turn
def parse(pattern: str) -> Any:
    """Parse a pattern into elements, each an operator and its value. Do not modify the result. Raises `re.error`."""
    return _parser.parse(pattern)


def has_flag(parsed: Any, flag: re.RegexFlag) -> bool:
    return bool(parsed.state.flags & flag)


def subpatterns(op: Any, value: Any) -> list[Any]:
    """The patterns inside an element: one for a group or repeat, one for each branch, or none."""
    if op in REPEATS:
        return [value[2]]
    if op is SUBPATTERN:
        return [value[3]]
    if op is BRANCH:
        return list(value[1])
    return [value] if op is ATOMIC_GROUP else []


def is_member(member: tuple[Any, Any], character: str) -> bool:
    """Whether a member of a set such as `[a-z\\d_]` matches a character."""
    kind, value = member
    if kind is RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if kind is LITERAL:
        return bool(chr(value) == character)
    return kind is not NEGATE and bool(CATEGORIES[value].match(character))
