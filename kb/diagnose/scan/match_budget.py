"""Limits how often and how long each pattern is tried on one log, so that the work is linear in its size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from time import thread_time

from kb.diagnose.scan.signature_matcher import Matcher, Pattern

ENOUGH = 2000  # matches of a pattern in one log, after which most literals are only counted
SAMPLING = 16  # after that, one literal in so many is still examined, since it may come from another rank
MAX_WINDOWS = 50  # tries of a pattern on the lines around a line; then one per `BLOCKS` blocks
BLOCKS = 16
EXTRA_WINDOWS = 20  # further tries at the end of a log, where the job failed
SLOW_S = 1e-3  # a try that takes longer is charged
LIMIT_S = 2.0  # for all slow tries of one pattern on one log
REFUND_S = 0.05  # refunded with each block, since the machine may be slow and not the pattern
MAX_FAILURES = 20_000  # failure lines that are examined; then `FURTHER_FAILURES` per block
FURTHER_FAILURES = 200
MAX_BOX_LINES = 10_000  # lines of rich's boxes, likewise
FURTHER_BOX_LINES = 200
PATIENCE_S, PATIENCE_S_PER_BYTE = 10.0, 0.1 / (1 << 20)  # CPU time for one log; most need a fifth of it
STRIDE = 16  # after that, one of so many candidate lines is examined


class MatchBudget:
    """The budget for one log; patterns and literals are given by their numbers in a `Matcher`."""

    def __init__(self, matcher: Matcher) -> None:
        self._matcher = matcher
        self._spent: dict[int, float] = {}  # seconds of slow tries, by pattern
        self._tried = [0] * len(matcher.patterns)
        self._matched = [0] * len(matcher.patterns)
        self._windows = [0] * len(matcher.patterns)
        self._is_exhausted = [False] * len(matcher.owners)  # by literal: whether all its patterns matched often enough
        self._occurred = [0] * len(matcher.owners)  # since then
        self._turns = [0] * len(matcher.patterns)  # since the pattern matched often enough
        self._skipped: Counter[int] = Counter()
        self._window_budget = MAX_WINDOWS * BLOCKS
        self._failures = MAX_FAILURES
        self._box_lines = MAX_BOX_LINES
        self._clock = thread_time()  # CPU time of this thread when it was last checked
        self._began = self._clock
        self._bytes = 0
        self._is_last = False
        self.is_sampled = False  # whether some candidate lines were not examined

    def next_block(self) -> None:
        self._clock = thread_time()
        self._window_budget += 1
        self._failures = max(self._failures, FURTHER_FAILURES)
        self._box_lines = max(self._box_lines, FURTHER_BOX_LINES)
        self._spent = {number: seconds - REFUND_S * (seconds < LIMIT_S) for number, seconds in self._spent.items()}

    def last_block(self) -> None:
        self._window_budget += EXTRA_WINDOWS * BLOCKS
        self._is_last = True

    def stride(self, size: int) -> int:
        """The n for which every nth candidate line in the next `size` bytes is examined; 1 at the end of a log."""
        is_late = self._clock - self._began > PATIENCE_S + PATIENCE_S_PER_BYTE * self._bytes
        self._bytes += size
        if self._is_last or not is_late:
            return 1
        self.is_sampled = True
        return STRIDE

    def is_skipped(self, literal: int) -> bool:
        """Whether a hit of this literal is only counted, because all its patterns matched often enough."""
        if not self._is_exhausted[literal]:
            return False
        self._occurred[literal] += 1
        if self._occurred[literal] % SAMPLING == 0:
            return False
        for number in self._matcher.owners[literal]:
            self._skipped[number] += 1
        return True

    def take_skipped(self) -> Iterator[tuple[Pattern, int]]:
        """Matches that were only counted since the last call, estimated from the share of tries that matched."""
        for number, count in self._skipped.items():
            share = self._matched[number] / self._tried[number]
            yield self._matcher.patterns[number], round(count * share)
        self._skipped.clear()

    def may_examine_failure(self) -> bool:
        """Whether another failure line may be examined."""
        self._failures -= 1
        return self._failures >= 0

    def may_examine_box(self) -> bool:
        """Whether another line of a box may be examined."""
        self._box_lines -= 1
        return self._box_lines >= 0

    def may_try(self, number: int) -> bool:
        """Whether a pattern may be tried again: it is not set aside and has not matched often enough."""
        if self._matched[number] >= ENOUGH:
            self._turns[number] += 1
            if self._turns[number] % SAMPLING:
                self._skipped[number] += 1
                return False
        if self._spent and self._spent.get(number, 0.0) >= LIMIT_S:
            return False
        self._tried[number] += 1
        return True

    def may_search_windows(self, number: int) -> bool:
        self._windows[number] += 1
        return self._windows[number] * BLOCKS <= self._window_budget

    def charge(self, number: int, seconds: float) -> bool:
        """Charge a slow try; returns whether the pattern has now reached its limit.

        On a busy machine, a try may take long because other processes run, so it costs at most the CPU time of this
        thread since the last check. Reading that clock for every try would be too slow.
        """
        now = thread_time()
        seconds, self._clock = min(seconds, now - self._clock), now
        self._spent[number] = max(0.0, self._spent.get(number, 0.0)) + seconds
        return self._spent[number] >= LIMIT_S

    def count_match(self, number: int) -> None:
        self._matched[number] += 1
        if self._matched[number] == ENOUGH:
            for literal, owners in enumerate(self._matcher.owners):
                if number in owners:
                    self._is_exhausted[literal] = all(owner >= 0 and self._matched[owner] >= ENOUGH for owner in owners)
