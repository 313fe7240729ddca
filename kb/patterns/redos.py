"""Detects patterns open to ReDoS (catastrophic backtracking) from their automaton, without running them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

from kb.patterns.automaton import Automaton, TooLarge, build
from kb.patterns.syntax import (
    ANY,
    GROUPREF_EXISTS,
    IN,
    LITERAL,
    LOOK_AROUNDS,
    NOT_LITERAL,
    REPEATS,
    UNBOUNDED,
    parse,
    subpatterns,
)

MAX_CHAIN = 2
SINGLE_CHARACTERS = (LITERAL, NOT_LITERAL, ANY, IN)


@cache
def backtracking_risk(pattern: str) -> str:
    """Why a pattern may take exponential or high polynomial time on some text, or "".

    A repeat that can match the same text in two ways is exponential: `(a+)+`, `(a|ab|b)*`. A chain of unbounded repeats
    that can match the same text is polynomial: `.*x.*y.*`. A chain of two is accepted, because log lines are short.
    `(?:\\w+\\.)+` and `\\d+, OpType=(\\w+).*` are neither. This does not model back references or the counts of bounded
    repeats; `kb.patterns.redos_timing` tries those.
    """
    if _is_harmless(parse(pattern)):
        return ""
    try:
        automaton = build(pattern)
    except TooLarge:
        return "the pattern is too large to be checked, and it has an unbounded repeat"
    if any(_is_ambiguous(automaton, loop) for loop in automaton.loops):
        return "an unbounded repeat can match the same text in two ways"
    if _longest_chain(automaton) > MAX_CHAIN:
        return f"more than {MAX_CHAIN} unbounded repeats can match the same text"
    return ""


def _is_harmless(parsed: Any) -> bool:
    """Whether the pattern has few unbounded repeats, each of one character and outside any other repeat, as most have.

    Such a repeat can match a text in only one way. Building an automaton would take twenty times as long to tell.
    """
    elements = list(_elements(parsed))
    if any(op is GROUPREF_EXISTS for op, _ in elements):
        return False
    repeats = [element for element in elements if element[0] in REPEATS]
    unbounded = [body for _, (_, most, body) in repeats if most is UNBOUNDED]
    nested = any(op in REPEATS for _, (_, _, body) in repeats for op, _ in _elements(body))
    is_simple = all(len(body) == 1 and body[0][0] in SINGLE_CHARACTERS for body in unbounded)
    return len(unbounded) <= MAX_CHAIN and is_simple and not (unbounded and nested)


def _elements(parsed: Any) -> Iterator[tuple[Any, Any]]:
    """The elements of a pattern and of the patterns inside it."""
    for op, value in parsed:
        yield op, value
        for inner in [value[1]] if op in LOOK_AROUNDS else subpatterns(op, value):
            yield from _elements(inner)


def _is_ambiguous(automaton: Automaton, loop: range) -> bool:
    """Whether two paths for the same text leave a position of the loop and meet again."""
    inside = {start: {end: n for end, n in automaton.after.get(start, {}).items() if end in loop} for start in loop}
    if any(ways > 1 for ends in inside.values() for ways in ends.values()):
        return True
    seen = {(position, position) for position in loop}
    pending = list(seen)
    while pending:
        first, second = pending.pop()
        for pair in product(inside[first], inside[second]):
            if first != second and pair[0] == pair[1]:
                return True
            if pair not in seen and automaton.classes[pair[0]] & automaton.classes[pair[1]]:
                seen.add(pair)
                pending.append(pair)
    return False


def _longest_chain(automaton: Automaton) -> int:
    """The most unbounded repeats in a row that can match the same text: the degree of the polynomial."""

    @cache
    def length(loop: range) -> int:
        later = (other for other in automaton.loops if other != loop and _is_chained(automaton, loop, other))
        return 1 + max(map(length, later), default=0)

    return max(map(length, automaton.loops), default=0)


def _is_chained(automaton: Automaton, loop: range, later: range) -> bool:
    """Whether some text that both repeats match leads from one to the other."""
    common = _matched(automaton, loop) & _matched(automaton, later)
    seen, pending = set(loop), list(loop)
    while pending and common:
        for after in automaton.after.get(pending.pop(), ()):
            if after not in seen and automaton.classes[after] & common:
                seen.add(after)
                pending.append(after)
    return not seen.isdisjoint(later)


def _matched(automaton: Automaton, loop: range) -> frozenset[str]:
    return frozenset[str]().union(*(automaton.classes[position] for position in loop))
