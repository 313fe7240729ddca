"""A signature's pattern: searching with it, and the texts that it cannot match without."""

from __future__ import annotations

import re
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
NO_WIDTH = (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT)
MOST_TEXTS = 32  # a larger set is given up for a shorter text that more matches share

Texts = frozenset[str]
EMPTY: Texts = frozenset({""})


def find(pattern: str, text: str) -> re.Match[str] | None:
    """First match of a signature in a log: `re.search`, case as written, `^` and `$` at the ends of lines."""
    return re.search(pattern, text, re.MULTILINE)


def literals(pattern: str) -> Texts:
    """Texts, case as written, of which every match contains at least one; empty when none are known.

    A log is searched for all of them at once before any pattern is run. Of the sets that a pattern offers, the
    one whose shortest text is longest is taken, as ripgrep and RE2 do.
    """
    parsed = _parser.parse(pattern)
    if parsed.state.flags & re.IGNORECASE:
        return frozenset()
    return _best(_sets(parsed))


def _best(sets: list[Texts]) -> Texts:
    return max(sets, key=lambda texts: (min(map(len, texts), default=0), -len(texts)), default=frozenset()) - EMPTY


def _sets(parsed: Any) -> list[Texts]:
    """Every set of texts, one of which any match has."""
    found: list[Texts] = []
    run = EMPTY  # what the adjacent items before this one can be, spelt out
    for op, value in parsed:
        if op in NO_WIDTH:
            continue
        exact = _exact(op, value)
        grown = frozenset(map("".join, product(run, exact))) if len(run) * len(exact) <= MOST_TEXTS else frozenset()
        if grown:
            run = grown
            continue
        found += [run, *_inside(op, value)]
        run = exact or EMPTY
    return [texts for texts in (*found, run) if "" not in texts and texts]


def _exact(op: Any, value: Any) -> Texts:
    """All texts that an item can match; empty when they are too many to spell out."""
    if op is _constants.LITERAL:
        return frozenset({chr(value)})
    if op is _constants.IN:
        return frozenset(chr(one) for _, one in value) if _is_spelt_out(value) else frozenset()
    if op is _constants.SUBPATTERN:
        return _exact_run(value[3])
    if op is _constants.BRANCH:
        branches = [_exact_run(branch) for branch in value[1]]
        texts: Texts = frozenset().union(*branches)
        return texts if all(branches) and len(texts) <= MOST_TEXTS else frozenset()
    if op in REPEATS and value[1] == 1:
        once = _exact_run(value[2])
        return once | EMPTY if once and value[0] == 0 else once
    return frozenset()


def _exact_run(parsed: Any) -> Texts:
    run = EMPTY
    for op, value in parsed:
        exact = _exact(op, value)
        if op in NO_WIDTH or not exact or len(run) * len(exact) > MOST_TEXTS:
            return frozenset()
        run = frozenset(map("".join, product(run, exact)))
    return run


def _is_spelt_out(members: Any) -> bool:
    return len(members) <= 4 and all(kind is _constants.LITERAL for kind, _ in members)


def _inside(op: Any, value: Any) -> list[Texts]:
    """Sets within an item that is not spelt out."""
    if op is _constants.SUBPATTERN:
        return _sets(value[3])
    if op is _constants.BRANCH:
        best = [_best(_sets(branch)) for branch in value[1]]
        return [frozenset().union(*best)] if all(best) else []
    if op in REPEATS and value[0] > 0:
        return _sets(value[2])
    return []
