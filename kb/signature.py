"""What can be said of a pattern without running it: a text it needs, and whether it may take for ever."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

from kb.automaton import REPEATS, Automaton, build

GAP = "\0"
MOST_CHAINED = 2


def find(pattern: str, text: str) -> re.Match[str] | None:
    """First match of a signature in a text (`re.search`, case as written)."""
    return re.search(pattern, text)


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


@cache
def backtracking_risk(pattern: str) -> str:
    """Why a pattern may take exponential or high polynomial time on some text, "" when it cannot.

    Exponential is a repeat that can match one text in two ways, `(a+)+` or `(a|ab|b)*`. Polynomial are unbounded
    repeats that can hand the same text on to one another, `.*x.*y.*`: two of them are accepted, as a log line
    is short, more are not. `(?:\\w+\\.)+` and `\\d+, OpType=(\\w+).*` are neither. Back references and numbers of
    a bounded repeat are beyond this; `kb.pump` tries those.
    """
    automaton = build(pattern)
    if any(_is_ambiguous(automaton, loop) for loop in automaton.loops):
        return "an unbounded repeat can match the same text in two ways"
    if _longest_chain(automaton) > MOST_CHAINED:
        return f"more than {MOST_CHAINED} unbounded repeats can match the same text"
    return ""


def _is_ambiguous(automaton: Automaton, loop: range) -> bool:
    """Whether two walks over one text part from a position of the loop and meet again."""
    inside = {start: {end: n for end, n in automaton.after.get(start, {}).items() if end in loop} for start in loop}
    if any(ways > 1 for ends in inside.values() for ways in ends.values()):
        return True
    seen = {(position, position) for position in loop}
    left = list(seen)
    while left:
        one, other = left.pop()
        for pair in product(inside[one], inside[other]):
            if one != other and pair[0] == pair[1]:
                return True
            if pair not in seen and automaton.classes[pair[0]] & automaton.classes[pair[1]]:
                seen.add(pair)
                left.append(pair)
    return False


def _longest_chain(automaton: Automaton) -> int:
    """How many unbounded repeats hand one text on from each to the next: the degree of the time it takes."""

    @cache
    def length(loop: range) -> int:
        later = (other for other in automaton.loops if other != loop and _hands_on(automaton, loop, other))
        return 1 + max(map(length, later), default=0)

    return max(map(length, automaton.loops), default=0)


def _hands_on(automaton: Automaton, loop: range, later: range) -> bool:
    """Whether some text that both repeats match leads from the one to the other."""
    common = _matched(automaton, loop) & _matched(automaton, later)
    seen, left = set(loop), list(loop)
    while left and common:
        for after in automaton.after.get(left.pop(), ()):
            if after not in seen and automaton.classes[after] & common:
                seen.add(after)
                left.append(after)
    return not seen.isdisjoint(later)


def _matched(automaton: Automaton, loop: range) -> frozenset[str]:
    return frozenset[str]().union(*(automaton.classes[position] for position in loop))
