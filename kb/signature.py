"""A signature's pattern: searching with it, and the text that it cannot match without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
GAP = "\0"


def find(pattern: str, text: str) -> re.Match[str] | None:
    """First match of a signature in a log: `re.search`, case as written, `^` and `$` at the ends of lines."""
    return re.search(pattern, text, re.MULTILINE)


def required_literal(pattern: str) -> str:
    """The longest text that every match contains, lower case; "" when there is none.

    A search looks for it in the lower-case log before it runs the pattern.
    """
    return max(_literals(_parser.parse(pattern)), key=len)


def _literals(parsed: Any) -> list[str]:
    """Texts that every match contains, in order."""
    return "".join(_skeleton(parsed)).split(GAP)


def _skeleton(parsed: Any) -> Iterator[str]:
    """What every match has, character by character, with gaps where it may have anything."""
    for op, value in parsed:
        if op is _constants.LITERAL:
            yield chr(value).lower()
        elif op is _constants.IN:
            yield _in_either_case(value)
        elif op is _constants.SUBPATTERN:
            yield from _skeleton(value[3])
        elif op is _constants.BRANCH:
            yield GAP + _common([_literals(branch) for branch in value[1]]) + GAP
        elif op in REPEATS and value[0] > 0:
            yield from (GAP, *_skeleton(value[2]), GAP)
        elif op not in (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT):
            yield GAP


def _in_either_case(members: Any) -> str:
    """`[Rr]` is an r; any other class is a gap."""
    letters = {chr(value).lower() if kind is _constants.LITERAL else GAP for kind, value in members}
    return letters.pop() if len(letters) == 1 else GAP


def _common(alternatives: list[list[str]]) -> str:
    """The longest text that every one of the alternatives has."""
    first, *others = alternatives
    parts = {run[start:end] for run in first for start in range(len(run)) for end in range(start + 1, len(run) + 1)}
    shared = (part for part in parts if all(any(part in run for run in runs) for runs in others))
    return max(shared, key=lambda part: (len(part), part), default="")
