"""Sets of characters whose meaning a later Python may change: those that `re` warns of (docs.python.org/3/library/re).

Read here, because `re` says so by a warning, and whoever makes that an error does so for all threads of a process.
"""

from __future__ import annotations

import re

TOKEN = re.compile(r"\\.|.", re.DOTALL)
OPERATORS = ("-", "&", "~", "|")  # doubled, they may become difference, intersection, ...


def may_change(pattern: str) -> bool:
    """Whether a pattern, which `re` compiles, has a set such as `[[a]`, `[!--a]` or `[a&&b]`. Comments count too."""
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
    """Where the set ends whose first member is at `at`; None when it has a doubled operator."""
    first = at
    while at < len(tokens):
        this = tokens[at]
        at += 1
        if this == "]" and at - 1 > first:
            return at
        if this in OPERATORS and at - 1 > first and tokens[at : at + 1] == [this]:
            return None
        if tokens[at : at + 1] == ["-"]:  # a range, or a hyphen at the end
            that = tokens[at + 1 : at + 2]
            if that == ["-"]:
                return None
            at += 2
            if that == ["]"]:
                return at
    return at
