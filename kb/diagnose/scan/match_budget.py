"""How often and how long each pattern is tried on one log: what keeps the work linear in what the log holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from time import thread_time

from kb.diagnose.scan.signature_matcher import Matcher, Pattern

ENOUGH = 2000  # matches of a pattern in one log; of further literals most are only counted
SAMPLED = 16  # one in so many is still looked at: it may come from another rank
MOST_WINDOWS = 50  # tries of one pattern on the lines around a line; then one in so many blocks
BLOCKS = 16
AT_THE_END = 20  # further ones for the end of a log, where it failed
SLOW_S = 1e-3  # a try that takes longer is booked
PATIENCE_S = 2.0  # for the slow tries of one pattern on one log
FORGIVEN_S = 0.05  # of these with every block: the machine may be slow, not the pattern
MOST_FAILURES = 20_000  # lines reporting a failure that are looked at; then some of each block
FURTHER_FAILURES = 200
MOST_BOXED = 10_000  # lines of rich's boxes, likewise
FURTHER_BOXED = 200


class Trials:
    """The account of one log, by the numbers of patterns and literals in a `Matcher`."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._spent: dict[int, float] = {}  # seconds, of those that had slow tries
        self._tried = [0] * len(matcher.patterns)
        self._matched = [0] * len(matcher.patterns)
        self._windows = [0] * len(matcher.patterns)
        self._is_full = [False] * len(matcher.owners)
        self._occurred = [0] * len(matcher.owners)  # since it is full
        self._turns = [0] * len(matcher.patterns)  # since it matched often enough
        self._passed: Counter[int] = Counter()
        self._allowed = MOST_WINDOWS * BLOCKS
        self._failures = MOST_FAILURES
        self._boxed = MOST_BOXED
        self._asked = thread_time()  # when the clock of this thread was looked at last

    def next_block(self) -> None:
        self._asked = thread_time()
        self._allowed += 1
        self._failures = max(self._failures, FURTHER_FAILURES)
        self._boxed = max(self._boxed, FURTHER_BOXED)
        self._spent = {number: seconds - FORGIVEN_S * (seconds < PATIENCE_S) for number, seconds in self._spent.items()}

    def last_block(self) -> None:
        self._allowed += AT_THE_END * BLOCKS

    def skips(self, literal: int) -> bool:
        """Whether this occurrence of a literal is only counted: all its patterns matched often enough."""
        if not self._is_full[literal]:
            return False
        self._occurred[literal] += 1
        if self._occurred[literal] % SAMPLED == 0:
            return False
        for number in self._matcher.owners[literal]:
            self._passed[number] += 1
        return True

    def passed(self) -> Iterator[tuple[Pattern, int]]:
        """How many matches were only counted since the last call, by the share of matches among the tries."""
        for number, count in self._passed.items():
            share = self._matched[number] / self._tried[number]
            yield self._matcher.patterns[number], round(count * share)
        self._passed.clear()

    def may_fail(self) -> bool:
        """Whether one more line that may report a failure is looked at."""
        self._failures -= 1
        return self._failures >= 0

    def may_unbox(self) -> bool:
        """Whether one more line of a box is looked at."""
        self._boxed -= 1
        return self._boxed >= 0

    def may_try(self, number: int) -> bool:
        """Whether a pattern is tried once more: it is not set aside, and did not match often enough."""
        if self._matched[number] >= ENOUGH:
            self._turns[number] += 1
            if self._turns[number] % SAMPLED:
                self._passed[number] += 1
                return False
        if self._spent and self._spent.get(number, 0.0) >= PATIENCE_S:
            return False
        self._tried[number] += 1
        return True

    def may_look_around(self, number: int) -> bool:
        self._windows[number] += 1
        return self._windows[number] * BLOCKS <= self._allowed

    def took(self, number: int, seconds: float) -> bool:
        """Book a slow try; whether it is the one that exhausts the patience.

        On a busy machine a try takes long because others run. It took no more than the thread has worked since it was
        asked last: that clock is too slow to be looked at for every try.
        """
        now = thread_time()
        seconds, self._asked = min(seconds, now - self._asked), now
        self._spent[number] = max(0.0, self._spent.get(number, 0.0)) + seconds
        return self._spent[number] >= PATIENCE_S

    def matched(self, number: int) -> None:
        self._matched[number] += 1
        if self._matched[number] == ENOUGH:
            for literal, owners in enumerate(self._matcher.owners):
                if number in owners:
                    self._is_full[literal] = all(owner >= 0 and self._matched[owner] >= ENOUGH for owner in owners)
