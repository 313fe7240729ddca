"""Whether a match may contain a newline, contain whole lines, or depend on the text before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kb.patterns.syntax import ANY, IN, LITERAL, NEGATE, NOT_LITERAL, has_flag, is_member, parse, subpatterns


def spans_lines(pattern: str) -> bool:
    """Whether a match may contain a newline."""
    return any(_matches(element, "\n") for element in _consuming(parse(pattern)))


def spans_text(pattern: str) -> bool:
    """Whether a match may contain whole lines, and not only white space around a newline."""
    return any(
        _matches(element, "\n") and _matches(element, " ") == _matches(element, "x")
        for element in _consuming(parse(pattern))
    )


def looks_behind(pattern: str) -> bool:
    """Whether a match may depend on the text before it, which a launcher's prefix would change."""
    return bool(re.search(r"(?<![\[\\])\^|\\A|\(\?<[!=]", pattern))


def _consuming(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """The elements that consume one character. A dot is returned as a negated set."""
    newline = [] if has_flag(parsed, re.DOTALL) else [(LITERAL, ord("\n"))]
    pending = list(parsed)
    while pending:
        op, value = pending.pop()
        if op is ANY:
            yield IN, [(NEGATE, None), *newline]
        elif op in (LITERAL, NOT_LITERAL, IN):
            yield op, value
        for inner in subpatterns(op, value):
            pending += inner


def _matches(element: tuple[Any, Any], character: str) -> bool:
    op, value = element
    if op is IN:
        return any(is_member(member, character) for member in value) != (value[0][0] is NEGATE)
    return bool(chr(value) == character) == (op is LITERAL)
