"""A pattern as a position automaton (Glushkov's construction): which character may follow which, in how many ways.

Every character of a pattern is a *position*. An edge counts the ways in which a backtracking matcher can go
from one position to the next without another character between: two ways inside a repeat, and the ways to
match a text double with every turn. Bounded repeats are written out up to `COPIES` times: beyond that a
number changes the constant, never the growth. Look-arounds consume nothing: they are built and joined to
nothing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

from kb.patterns.literals import REPEATS

COPIES = 3
ALPHABET = frozenset(map(chr, range(9, 127))) | {"中"}
ESCAPES = {
    _constants.CATEGORY_DIGIT: r"\d",
    _constants.CATEGORY_NOT_DIGIT: r"\D",
    _constants.CATEGORY_SPACE: r"\s",
    _constants.CATEGORY_NOT_SPACE: r"\S",
    _constants.CATEGORY_WORD: r"\w",
    _constants.CATEGORY_NOT_WORD: r"\W",
}


@dataclass(frozen=True, slots=True)
class Automaton:
    """`classes[p]` are the characters of position p, `after[p]` the ways to each next one, `loops` the positions
    of every unbounded repeat that lies in no other."""

    classes: tuple[frozenset[str], ...]
    after: dict[int, Counter[int]]
    loops: tuple[range, ...]


def build(pattern: str) -> Automaton:
    """The automaton of a valid pattern."""
    parsed = _parser.parse(pattern)
    builder = _Builder(ignores_case=bool(parsed.state.flags & re.IGNORECASE))
    builder.sequence(parsed)
    return Automaton(tuple(builder.classes), dict(builder.after), tuple(builder.loops))


def characters(op: Any, value: Any) -> frozenset[str]:
    """The characters of `ALPHABET`, and literal ones beyond it, that one element of a pattern matches."""
    if op is _constants.LITERAL:
        return frozenset(chr(value))
    if op is _constants.NOT_LITERAL:
        return ALPHABET - {chr(value)}
    if op is _constants.ANY:
        return ALPHABET - {"\n"}
    if op is not _constants.IN:
        return ALPHABET  # a back reference may be anything
    is_negated = value[0][0] is _constants.NEGATE
    members = frozenset[str]().union(*map(_member, value[is_negated:]))
    return ALPHABET - members if is_negated else members


def _member(item: tuple[Any, Any]) -> frozenset[str]:
    kind, value = item
    if kind is _constants.RANGE:
        low, high = value
        return frozenset(c for c in ALPHABET if low <= ord(c) <= high) | {chr(low)}
    return _escape(ESCAPES[value]) if kind is _constants.CATEGORY else frozenset(chr(value))


@cache
def _escape(escape: str) -> frozenset[str]:
    return frozenset(c for c in ALPHABET if re.match(escape, c))


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece: the ways to match nothing, and the positions it may begin and end with, each with its ways."""

    empty: int = 1
    first: Counter[int] = field(default_factory=Counter)
    last: Counter[int] = field(default_factory=Counter)


class _Builder:
    """Numbers the positions of a parsed pattern and collects what may follow them."""

    def __init__(self, *, ignores_case: bool) -> None:
        self.classes: list[frozenset[str]] = []
        self.after: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.loops: list[range] = []
        self._ignores_case = ignores_case
        self._depth = 0

    def sequence(self, parsed: Any) -> _Part:
        whole = _Part()
        for op, value in parsed:
            whole = self._join(whole, self._element(op, value))
        return whole

    def _element(self, op: Any, value: Any) -> _Part:
        if op is _constants.BRANCH:
            return _choice([self.sequence(branch) for branch in value[1]])
        if op is _constants.GROUPREF_EXISTS:
            return _choice([self.sequence(branch or ()) for branch in value[1:]])
        if op is _constants.SUBPATTERN:
            return self.sequence(value[3])
        if op is _constants.ATOMIC_GROUP:
            return self.sequence(value)
        if op in REPEATS:
            return self._repeat(*value)
        if op in (_constants.ASSERT, _constants.ASSERT_NOT):
            self.sequence(value[1])
            return _Part()
        return _Part() if op is _constants.AT else self._position(characters(op, value))

    def _position(self, matched: frozenset[str]) -> _Part:
        if self._ignores_case:
            matched |= {character.swapcase() for character in matched}
        self.classes.append(matched)
        here = Counter({len(self.classes) - 1: 1})
        return _Part(0, here, here)

    def _join(self, one: _Part, other: _Part) -> _Part:
        self._connect(one, other)
        first = one.first + _times(other.first, one.empty) if one.empty else one.first
        last = other.last + _times(one.last, other.empty) if other.empty else other.last
        return _Part(one.empty * other.empty, first, last)

    def _connect(self, one: _Part, other: _Part) -> None:
        for (start, ways), (end, more) in product(one.last.items(), other.first.items()):
            self.after[start][end] += ways * more

    def _repeat(self, least: int, most: Any, body: Any) -> _Part:
        whole = _Part()
        is_unbounded = most is _constants.MAXREPEAT
        for _ in range(min(least - 1 if is_unbounded else least, COPIES)):
            whole = self._join(whole, self.sequence(body))
        if is_unbounded:
            return self._join(whole, self._loop(body) if least else _optional(self._loop(body)))
        rest = _Part()
        for _ in range(min(most - least, COPIES)):
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


def _optional(part: _Part) -> _Part:
    return _Part(part.empty + 1, part.first, part.last)


def _choice(parts: list[_Part]) -> _Part:
    first, last = Counter[int](), Counter[int]()
    for part in parts:
        first += part.first
        last += part.last
    return _Part(sum(part.empty for part in parts), first, last)


def _times(ways: Counter[int], factor: int) -> Counter[int]:
    return Counter({position: count * factor for position, count in ways.items() if factor})
