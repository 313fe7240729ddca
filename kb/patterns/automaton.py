"""A pattern as a position automaton (Glushkov's construction): which character may follow which, in how many ways.

Every character of a pattern is a *position*. An edge counts the ways in which a backtracking matcher can go from one
position to the next without consuming another character: with two ways inside a repeat, the number of ways to match a
text doubles with every turn. Bounded repeats are written out up to `COPIES` times: more copies would change the
constant, never the growth. Look-arounds consume nothing: their automata are built, but not connected to the rest.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from kb.patterns.syntax import (
    ANY,
    ATOMIC_GROUP,
    BRANCH,
    GROUPREF_EXISTS,
    IN,
    LITERAL,
    LOOK_AROUNDS,
    NEGATE,
    NOT_LITERAL,
    RANGE,
    REPEATS,
    SUBPATTERN,
    UNBOUNDED,
    ZERO_WIDTH,
    has_flag,
    is_member,
    parse,
)

COPIES = 3
MOST_STEPS = 20_000  # parts and edges to build; the largest of kb's own signatures takes a few hundred
ALPHABET = frozenset(map(chr, range(9, 127))) | {"中"}

Ways = Mapping[int, int]  # position to number of ways; plain dictionaries take a third of the time of `Counter`
NO_WAYS: Ways = {}


class TooLarge(ValueError):
    """The automaton of the pattern takes more than `MOST_STEPS` to build."""


@dataclass(frozen=True, slots=True)
class Automaton:
    """An automaton: `classes[p]` are the characters of position p, `after[p]` the number of ways to each next position,
    `loops` the positions of every outermost unbounded repeat.
    """

    classes: tuple[frozenset[str], ...]
    after: Mapping[int, Ways]
    loops: tuple[range, ...]


def build(pattern: str) -> Automaton:
    """Build the automaton of a valid pattern. Raises `TooLarge`."""
    parsed = parse(pattern)
    builder = _Builder(ignores_case=has_flag(parsed, re.IGNORECASE))
    builder.sequence(parsed)
    return Automaton(tuple(builder.classes), dict(builder.after), tuple(builder.loops))


def characters(op: Any, value: Any) -> frozenset[str]:
    """The characters that one element of a pattern matches: those of `ALPHABET`, and literal characters outside it."""
    if op is LITERAL:
        return frozenset(chr(value))
    if op is NOT_LITERAL:
        return ALPHABET - {chr(value)}
    if op is ANY:
        return ALPHABET - {"\n"}
    if op is not IN:
        return ALPHABET  # a back reference can match anything
    is_negated = value[0][0] is NEGATE
    members = frozenset[str]().union(*map(_members, value[is_negated:]))
    return ALPHABET - members if is_negated else members


def _members(member: tuple[Any, Any]) -> frozenset[str]:
    kind, value = member
    if kind is LITERAL:
        return frozenset(chr(value))
    members = _of_alphabet(kind, value)
    return members | {chr(value[0])} if kind is RANGE else members


@cache
def _of_alphabet(kind: Any, value: Any) -> frozenset[str]:
    return frozenset(character for character in ALPHABET if is_member((kind, value), character))


class _Part(NamedTuple):
    """Part of a pattern: the number of ways to match nothing, and to begin and end with each position."""

    empty: int = 1
    first: Ways = NO_WAYS
    last: Ways = NO_WAYS


class _Builder:
    """Numbers the positions of a parsed pattern and connects them."""

    def __init__(self, *, ignores_case: bool) -> None:
        self.classes: list[frozenset[str]] = []
        self.after: defaultdict[int, defaultdict[int, int]] = defaultdict(partial(defaultdict, int))
        self.loops: list[range] = []
        self._ignores_case = ignores_case
        self._depth = 0
        self._steps = 0

    def sequence(self, parsed: Any) -> _Part:
        whole = _Part()
        self._count(1)
        for op, value in parsed:
            whole = self._join(whole, self._element(op, value))
        return whole

    def _element(self, op: Any, value: Any) -> _Part:
        if op is BRANCH:
            return _choice([self.sequence(branch) for branch in value[1]])
        if op is GROUPREF_EXISTS:
            return _choice([self.sequence(branch or ()) for branch in value[1:]])
        if op is SUBPATTERN:
            return self.sequence(value[3])
        if op is ATOMIC_GROUP:
            return self.sequence(value)
        if op in REPEATS:
            return self._repeat(*value)
        if op in LOOK_AROUNDS:
            self.sequence(value[1])
            return _Part()
        return _Part() if op in ZERO_WIDTH else self._position(characters(op, value))

    def _position(self, matched: frozenset[str]) -> _Part:
        if self._ignores_case:
            matched |= {character.swapcase() for character in matched}
        self.classes.append(matched)
        position = {len(self.classes) - 1: 1}
        return _Part(0, position, position)

    def _join(self, left: _Part, right: _Part) -> _Part:
        self._connect(left, right)
        first = _sum(left.first, right.first, left.empty) if left.empty else left.first
        last = _sum(right.last, left.last, right.empty) if right.empty else right.last
        return _Part(left.empty * right.empty, first, last)

    def _connect(self, left: _Part, right: _Part) -> None:
        self._count(len(left.last) * len(right.first))
        for start, ways_to_start in left.last.items():
            after = self.after[start]
            for end, ways_from_end in right.first.items():
                after[end] += ways_to_start * ways_from_end

    def _repeat(self, minimum: int, maximum: Any, body: Any) -> _Part:
        whole = _Part()
        is_unbounded = maximum is UNBOUNDED
        for _ in range(min(minimum - 1 if is_unbounded else minimum, COPIES)):
            whole = self._join(whole, self.sequence(body))
        if is_unbounded:
            return self._join(whole, self._loop(body) if minimum else _optional(self._loop(body)))
        rest = _Part()
        for _ in range(min(maximum - minimum, COPIES)):
            rest = _optional(self._join(self.sequence(body), rest))
        return self._join(whole, rest)

    def _loop(self, body: Any) -> _Part:
        start = len(self.classes)
        self._depth += 1
        turn = self.sequence(body)
        self._depth -= 1
        self._connect(turn, turn)
        if not self._depth:
            self.loops.append(range(start, len(self.classes)))
        return turn

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise TooLarge


def _optional(part: _Part) -> _Part:
    return _Part(part.empty + 1, part.first, part.last)


def _choice(parts: list[_Part]) -> _Part:
    first = last = NO_WAYS
    for part in parts:
        first, last = _sum(first, part.first), _sum(last, part.last)
    return _Part(sum(part.empty for part in parts), first, last)


def _sum(ways: Ways, more: Ways, factor: int = 1) -> Ways:
    """Add `more`, multiplied by `factor`, to `ways`."""
    total = dict(ways)
    for position, count in more.items():
        total[position] = total.get(position, 0) + count * factor
    return total
