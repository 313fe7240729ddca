"""A redaction rule: a pattern for something that must not leave a machine, and the page that documents its form.

Each named group of a pattern is replaced; its name (without digits) is the kind of the placeholder. The rest of the
match is context and stays. Every pattern takes linear time: repeats are bounded, or come last and cannot fail.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NamedTuple

HOST = r"[A-Za-z0-9][\w.-]{0,252}"  # a host name or address, as a part of patterns


class Rule(NamedTuple):
    """A line is searched if, in lower case, it contains one of `hints` or all characters of `repeated` anywhere.

    `repeated` is one character, written as many times as the line must contain it.
    """

    source: str
    hints: tuple[str, ...]
    repeated: str
    pattern: re.Pattern[str]
    find: Callable[[str], re.Match[str] | None]


def make_rule(source: str, hints: str, pattern: str, repeated: str = "") -> Rule:
    """Compile a rule. `hints` are separated by blanks. A pattern that begins with `^` is tried only at line starts."""
    compiled = re.compile(pattern)
    find = compiled.match if pattern.startswith("^") else compiled.search
    return Rule(source, tuple(hints.split()), repeated, compiled, find)
