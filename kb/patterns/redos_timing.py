"""Finds patterns that take too long by trying: on their own repeats, and on their sample, over and over.

The static check in `kb.patterns.redos` finds what is slow by its structure; this finds some of what that cannot
see, such as a back reference or the number of a bounded repeat.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from re import _constants, _parser  # type: ignore[attr-defined]  # the parser has no public name; stable since 3.11
from typing import Any

from kb.errors import LaunchError
from kb.patterns.automaton import characters
from kb.patterns.literals import REPEATS, parts

STOPWATCH = Path(__file__).with_name("stopwatch.py")
LIMIT_S = 2.0  # CPU seconds for all texts of one pattern; an ordinary one takes a thousandth of it
OUTSIDE_S = 600.0  # wall seconds for all patterns, should the machine have no CPU time to give
TURNS = (29, 300)  # enough for two to the n; enough for n to the fourth, and for n cubed not too much
SAMPLES = 20
MISFITS = ("\0", "\n\0")  # what no pattern wants next, so that every way has to be tried
MOST_UNITS = 40  # repeats of one pattern that are pumped


def slow(texts: Mapping[str, Sequence[str]], limit_s: float = LIMIT_S) -> frozenset[str]:
    """The patterns (keys) that need more than `limit_s` of CPU time for their texts. Raises `LaunchError`."""
    left = list(texts.items())
    found: set[str] = set()
    while left:
        done = _done_in_time(left, limit_s)
        found.update(pattern for pattern, _ in left[done : done + 1])
        left = left[done + 1 :]
    return frozenset(found)


def _done_in_time(cases: list[tuple[str, Sequence[str]]], limit_s: float) -> int:
    """How many of the first patterns were done in time: all, or those before the first slow one."""
    argv = [sys.executable, "-I", str(STOPWATCH), str(limit_s)]
    try:
        ended = subprocess.run(
            argv, input=json.dumps(cases), capture_output=True, text=True, timeout=OUTSIDE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"patterns cannot be timed: {error}", "is the machine short of processes or CPU?") from error
    if ended.returncode not in (0, -signal.SIGVTALRM):
        raise LaunchError(f"patterns cannot be timed: {ended.stderr[-500:].strip() or ended.returncode}")
    return ended.stdout.count("done")


def pumped(pattern: str, sample: str) -> list[str]:
    """The texts to try a pattern on; at most a few hundred kilobytes."""
    parsed = _parser.parse(pattern)
    texts = [sample, sample * SAMPLES, sample[:-1] * SAMPLES]
    for before, unit, limit in islice(_repeats(parsed, ""), MOST_UNITS):
        texts += [before + unit * turns for turns in {*TURNS, limit}]
    return [text + misfit for text in dict.fromkeys(texts) for misfit in MISFITS]


def _repeats(parsed: Any, before: str) -> Iterator[tuple[str, str, int]]:
    """Every repeat: a text that leads to it, one turn of it, and one turn less than it asks for."""
    for op, value in parsed:
        if op in REPEATS:
            yield before, _example(value[2], 1), min(max(value[0] - 1, 1), TURNS[1])
        for part in parts(op, value):
            yield from _repeats(part, before)
        before += _example([(op, value)], 0)


def _example(parsed: Any, least: int) -> str:
    """A short text that matches; repeats are gone through as often as they must, but at least so often."""
    text = ""
    for op, value in parsed:
        if op in REPEATS:
            text += _example(value[2], least) * max(least, min(value[0], 50))
        elif inner := parts(op, value):
            text += _example(inner[0], least)
        elif op in (_constants.LITERAL, _constants.NOT_LITERAL, _constants.ANY, _constants.IN):
            text += max(characters(op, value) & {"a", "0", " "}, default="") or min(characters(op, value), default="")
    return text
