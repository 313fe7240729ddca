"""A signature's pattern: searching with it, and the texts that it cannot match without."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import product
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

ESCAPES = (
    (_constants.CATEGORY_DIGIT, r"\d"),
    (_constants.CATEGORY_NOT_DIGIT, r"\D"),
    (_constants.CATEGORY_SPACE, r"\s"),
    (_constants.CATEGORY_NOT_SPACE, r"\S"),
    (_constants.CATEGORY_WORD, r"\w"),
    (_constants.CATEGORY_NOT_WORD, r"\W"),
)
REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
NO_WIDTH = (_constants.AT, _constants.ASSERT, _constants.ASSERT_NOT)
LONG = 8  # characters of a literal that is no common word
MOST_TEXTS = 32  # a larger set is given up for a shorter text that more matches share

# What healthy jobs print over and over, as transformers, torchtitan, Megatron, DeepSpeed, tqdm and NCCL word it.
ORDINARY = """\
{'loss': 2.31, 'grad_norm': 1.25, 'learning_rate': 2e-05, 'epoch': 0.5}
{'loss': '1.905', 'grad_norm': '0.8125', 'learning_rate': '1.9e-05', 'epoch': '0.52'}
{'train_runtime': 12.5, 'train_loss': 2.25, 'epoch': 1.0}
step: 10  loss: 2.31  grad_norm: 1.25  memory: 20.11GiB(25.2%)  tps: 4,210  mfu: 38.10%
 iteration 10/ 100 | lm loss: 2.310E+00 | loss scale: 1.0 | grad norm: 1.250 | number of nan iterations:   0 |
[2026-01-01 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=0, lr=[2e-05], mom=[(0.9, 0.95)]
 10%|█         | 10/100 [00:10<01:30, 1.00it/s, train_loss=2.31]
node01:101:102 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[1] via P2P/CUMEM
"""

Texts = frozenset[str]
EMPTY: Texts = frozenset({""})


def find(pattern: str, text: str) -> re.Match[str] | None:
    """First match of a signature in a log: `re.search`, case as written, `^` and `$` at the ends of lines."""
    return re.search(pattern, text, re.MULTILINE)


def literals(pattern: str) -> Texts:
    """Texts, case as written, of which every match contains at least one; empty when none are known.

    A log is searched for all of them at once before any pattern is run. Of the sets that a pattern offers, the
    one is taken that is rarest in what healthy jobs print, then the one whose shortest text is longest.
    """
    parsed = _parser.parse(pattern)
    if parsed.state.flags & re.IGNORECASE:
        return frozenset()
    return _best(_sets(parsed))


def last_literals(pattern: str) -> Texts:
    """The same, of the set that stands last and is not short: where a match over several lines is complete.

    What opens it ("Saving the model") is often printed by healthy jobs too, what closes it is not.
    """
    best = literals(pattern)
    rare = [
        texts for texts in _sets(_parser.parse(pattern)) if min(map(len, texts)) >= LONG and _selects(texts)[0] == 0
    ]
    return rare[-1] if best and rare else best


def spans_lines(pattern: str) -> bool:
    """Whether a match may hold a newline."""
    return any(_takes(element, "\n") for element in _elements(_parser.parse(pattern)))


def spans_text(pattern: str) -> bool:
    """Whether a match may hold whole lines, and not only white space that may be a line's end."""
    parsed = _parser.parse(pattern)
    return any(_takes(element, "\n") and _takes(element, " ") == _takes(element, "x") for element in _elements(parsed))


def looks_behind(pattern: str) -> bool:
    """Whether a match may depend on what stands before it: a launcher's prefix would then hide it."""
    return bool(re.search(r"(?<![\[\\])\^|\\A|\(\?<[!=]", pattern))


def _elements(parsed: Any, *, is_dotall: bool | None = None) -> Iterator[tuple[Any, Any]]:
    """Those that consume one character; a dot that takes any as the negation of nothing."""
    is_dotall = bool(parsed.state.flags & re.DOTALL) if is_dotall is None else is_dotall
    for op, value in parsed:
        if op is _constants.ANY:
            yield _constants.IN, [(_constants.NEGATE, None)] + [(_constants.LITERAL, ord("\n"))] * (not is_dotall)
        elif op in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.IN):
            yield op, value
        for part in parts(op, value):
            yield from _elements(part, is_dotall=is_dotall)


def _takes(element: tuple[Any, Any], character: str) -> bool:
    op, value = element
    if op is _constants.IN:
        return any(_is_member(member, character) for member in value) != (value[0][0] is _constants.NEGATE)
    return bool(chr(value) == character) == (op is _constants.LITERAL)


def _is_member(member: tuple[Any, Any], character: str) -> bool:
    kind, value = member
    if kind is _constants.RANGE:
        return bool(value[0] <= ord(character) <= value[1])
    if kind is _constants.CATEGORY:
        return any(value is category and re.match(escape, character) for category, escape in ESCAPES)
    return bool(kind is _constants.LITERAL and chr(value) == character)


def parts(op: Any, value: Any) -> list[Any]:
    """The patterns inside an element of a parsed one: one, one a branch, or none."""
    if op in REPEATS:
        return [value[2]]
    if op is _constants.SUBPATTERN:
        return [value[3]]
    if op is _constants.BRANCH:
        return list(value[1])
    return [value] if op is _constants.ATOMIC_GROUP else []


def _best(sets: list[Texts]) -> Texts:
    return max(sets, key=_selects, default=frozenset()) - EMPTY


def _selects(texts: Texts) -> tuple[int, int, int]:
    """How well a set tells its pattern's matches from all other text."""
    return -sum(map(ORDINARY.count, texts)), min(map(len, texts), default=0), -len(texts)


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
