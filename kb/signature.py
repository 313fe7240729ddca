"""Literals that a pattern cannot match without: what lets a search skip a regular expression, and lint judge it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)


def required_literal(pattern: str) -> str:
    """The longest text that every match contains, lower case; "" when there is none."""
    parsed = _parser.parse(pattern)
    return max(_literals(parsed), key=len, default="").lower()


def _literals(parsed: Any) -> Iterator[str]:
    """Runs of characters that every match has, in any order."""
    run = ""
    for op, value in parsed:
        if op is _constants.LITERAL:
            run += chr(value)
            continue
        yield run
        run = ""
        if op is _constants.SUBPATTERN:
            yield from _literals(value[3])
        elif op in _REPEATS and value[0] > 0:
            yield from _literals(value[2])
    yield run


def backtracking_risk(pattern: str) -> str:
    """Why a pattern may take exponential or high polynomial time, "" when nothing was found.

    Found are a repeat of a repeat over the same characters, `(a+)+`, a repeat of alternatives that begin
    alike, `(a|ab)*`, and more than two unbounded repeats of anything, `.*.*.*`. Sound regular expressions
    that fall under these rules are rewritten: a signature needs none of them.
    """
    parsed = _parser.parse(pattern)
    for op, value in _walk(parsed):
        if op in _REPEATS and value[1] is _constants.MAXREPEAT:
            inner = list(_walk(value[2]))
            if any(o in _REPEATS and v[1] is _constants.MAXREPEAT for o, v in inner):
                return "an unbounded repeat inside an unbounded repeat"
            if any(o is _constants.BRANCH for o, _ in inner):
                return "alternatives inside an unbounded repeat"
    wide = [v for o, v in _walk(parsed) if o in _REPEATS and v[1] is _constants.MAXREPEAT and _is_wide(v[2])]
    return "more than two unbounded repeats of anything" if len(wide) > 2 else ""


def _walk(parsed: Any) -> Iterator[tuple[Any, Any]]:
    for op, value in parsed:
        yield op, value
        if op in _REPEATS:
            yield from _walk(value[2])
        elif op is _constants.SUBPATTERN:
            yield from _walk(value[3])
        elif op is _constants.BRANCH:
            for branch in value[1]:
                yield from _walk(branch)
        elif op in (_constants.ASSERT, _constants.ASSERT_NOT):
            yield from _walk(value[1])


def _is_wide(parsed: Any) -> bool:
    """Whether a repeated item matches nearly anything: a dot, a negated class, or a category such as `\\S`."""
    op, value = parsed[0]
    if op is _constants.ANY:
        return True
    return op is _constants.IN and value[0][0] in (_constants.NEGATE, _constants.CATEGORY)


def find(pattern: str, text: str) -> re.Match[str] | None:
    """First match of a signature in a text (`re.search`, case as written)."""
    return re.search(pattern, text)
