"""Finds slow patterns by timing them on long texts, made of their own repeats and of their sample.

The static check in `kb.patterns.redos` finds patterns that are slow by structure. This finds some that it cannot see,
with a back reference or a large count of a bounded repeat.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from kb.errors import LaunchError
from kb.patterns.automaton import characters
from kb.patterns.syntax import ANY, IN, LITERAL, NOT_LITERAL, REPEATS, parse, subpatterns

STOPWATCH = Path(__file__).with_name("stopwatch.py")
LIMIT_S = 2.0  # CPU seconds for all texts of one pattern; an ordinary pattern takes a thousandth of that
WALL_LIMIT_S = 600.0  # for all patterns together, in case the machine has no CPU time to give
TURNS = (29, 300)  # 29 expose exponential time; 300 expose n**4 and are still affordable for n**3
SAMPLES = 20
MISFITS = ("\0", "\n\0")  # no pattern matches these after the text, so the matcher has to try every way
MAX_REPEATS = 40  # repeats of one pattern that are tried
LONGEST_EXAMPLE = 1000  # characters; nested repeats multiply


def slow(texts: Mapping[str, Sequence[str]], limit_s: float = LIMIT_S) -> frozenset[str]:
    """The patterns (keys) that need more than `limit_s` of CPU time for their texts. Raises `LaunchError`."""
    pending = list(texts.items())
    slow_patterns: set[str] = set()
    while pending:
        count = _count_in_time(pending, limit_s)
        slow_patterns.update(pattern for pattern, _ in pending[count : count + 1])
        pending = pending[count + 1 :]
    return frozenset(slow_patterns)


def _count_in_time(cases: list[tuple[str, Sequence[str]]], limit_s: float) -> int:
    """How many patterns finished in time: all, or those before the first slow one."""
    argv = [sys.executable, "-I", str(STOPWATCH), str(limit_s)]
    try:
        process = subprocess.run(
            argv, input=json.dumps(cases), capture_output=True, text=True, timeout=WALL_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(
            f"patterns cannot be timed: {error}", "is the machine out of processes or CPU time?"
        ) from error
    if process.returncode not in (0, -signal.SIGVTALRM):
        raise LaunchError(f"patterns cannot be timed: {process.stderr[-500:].strip() or process.returncode}")
    return process.stdout.count("finished")


def pumped(pattern: str, sample: str) -> list[str]:
    """The texts to time a pattern on; at most a few hundred kilobytes."""
    parsed = parse(pattern)
    texts = [sample, sample * SAMPLES, sample[:-1] * SAMPLES]
    for before, unit, limit in islice(_repeats(parsed, ""), MAX_REPEATS):
        texts += [before + unit * turns for turns in {*TURNS, limit}]
    return [text + misfit for text in dict.fromkeys(texts) for misfit in MISFITS]


def _repeats(parsed: Any, before: str) -> Iterator[tuple[str, str, int]]:
    """For every repeat: a text that leads to it, the text of one turn, and one turn less than its minimum."""
    for op, value in parsed:
        if op in REPEATS:
            yield before, _example(value[2], 1), min(max(value[0] - 1, 1), TURNS[1])
        for inner in subpatterns(op, value):
            yield from _repeats(inner, before)
        before += _example([(op, value)], 0)


def _example(parsed: Any, least: int) -> str:
    """A short text that matches, with each repeat taken its minimum number of times, and at least `least` times."""
    text = ""
    for op, value in parsed:
        if op in REPEATS:
            text += (_example(value[2], least) * max(least, min(value[0], 50)))[:LONGEST_EXAMPLE]
        elif inner := subpatterns(op, value):
            text += _example(inner[0], least)
        elif op in (LITERAL, NOT_LITERAL, ANY, IN):
            text += max(characters(op, value) & {"a", "0", " "}, default="") or min(characters(op, value), default="")
    return text
