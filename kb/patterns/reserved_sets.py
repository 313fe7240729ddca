"""Finds character sets whose meaning may change in a later Python, as `re` warns (docs.python.org/3/library/re).

They are found here, because turning that warning into an error would affect all threads of the process.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\.|.", re.DOTALL)
OPERATORS = ("-", "&", "~", "|")  # doubled, they may become difference, intersection, ...


def may_change(pattern: str) -> bool:
    """Whether a valid pattern has a set such as `[[a]`, `[!--a]` or `[a&&b]`, even in a comment."""
    tokens = TOKEN.findall(pattern)
    at = 0
    while at < len(tokens):
        at += 1
        if tokens[at - 1] == "[":
            if tokens[at : at + 1] == ["["]:
                return True
            at += tokens[at : at + 1] == ["^"]
            end = _end(tokens, at)
            if end is None:
                return True
            at = end
    return False


def _end(tokens: list[str], at: int) -> int | None:
    """The position after the set whose first member is at `at`; None when it has a doubled operator."""
    first = at
    while at < len(tokens):
        current = tokens[at]
        at += 1
        if current == "]" and at - 1 > first:
            return at
        if current in OPERATORS and at - 1 > first and tokens[at : at + 1] == [current]:
            return None
        if tokens[at : at + 1] == ["-"]:  # a range, or a hyphen at the end
            upper = tokens[at + 1 : at + 2]
            if upper == ["-"]:
                return None
            at += 2
            if upper == ["]"]:
                return at
    return at
