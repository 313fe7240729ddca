"""One pass over one log, in constant memory: the lines that hold a literal of a signature or report a failure.

A block is searched for all literals at once; only the lines around what is found are decoded and matched, and only
those that match or report a failure are asked for rank and time. Work is bounded whatever the log holds: of an
overlong line the text around a literal is seen, a flood of one signature is counted without being matched again,
and a pattern that takes long on a text is set aside and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from time import perf_counter

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.scan.accumulator import Accumulator
from kb.diagnose.scan.line_window import Spot
from kb.diagnose.scan.literal_hits import every, grouped
from kb.diagnose.scan.log_prefix import LogLine, parse_prefix, strip_escapes
from kb.diagnose.scan.match_budget import SLOW_S, Trials
from kb.diagnose.scan.nccl_processes import NcclProcesses
from kb.diagnose.scan.rich_traceback import unboxed
from kb.diagnose.scan.signature_matcher import FAR, Matcher

CONTEXT = FAR  # bytes kept on either side of what is searched
BLOCK = 1 << 20  # bytes that are searched at once
ESCAPE = 64  # bytes in which a colour ends
TAIL = 4096  # bytes in which the last line is looked for
REPORTS = re.compile(
    rb"most recent call first\)|Thread \d{1,20} \((?:idle|active)|\"thread_id\":|^Communicators\.\.\.", re.MULTILINE
)
MOST_REPORTS = 8 << 20  # bytes of a log that are kept for the readers of stacks and RAS reports


class Scanner:
    """Feed it a log in pieces, cut anywhere, then `close` it. `reports` are then the parts that hold stacks or such."""

    def __init__(
        self, matcher: Matcher, tally: Accumulator, source: str, rank: int | None, written: float | None
    ) -> None:
        self._matcher, self._tally, self._source = matcher, tally, source
        self._rank, self._written = rank, written
        self._processes = NcclProcesses()
        self._trials = Trials(matcher)
        self._pending = bytearray()  # what makes no block yet
        self._kept = b""  # context, then what is not searched yet
        self._at = 0  # where that begins
        self._base = 0  # bytes of the log before `_kept`, less colours
        self._number = 1  # of the line at `_at`
        self._counted = 0, 1  # a place behind that, and the number of the line there
        self._line_at = self._looked_to = -1  # where the line that was looked at last starts, and how far it was
        self._seen = set[int]()  # what it was found to have
        self._has_report = False
        self.reports = b""

    def feed(self, piece: bytes) -> None:
        self._tally.add_excerpt(piece)
        self._tally.bytes += len(piece)
        for start in range(0, len(piece), BLOCK):
            self._pending += piece[start : start + BLOCK]
            if len(self._pending) >= BLOCK:
                self._take()

    def close(self) -> None:
        self._kept += strip_escapes(bytes(self._pending))
        self._trials.last_block()
        self._search(len(self._kept))
        self._tally.lines += bool(self._kept) and not self._kept.endswith(b"\n")
        self._tally.end_log(list(self._last_lines()), self._matcher.patterns)

    def _take(self) -> None:
        """Search what is pending, but for its end: what follows may belong to it."""
        escape = self._pending.rfind(b"\x1b", len(self._pending) - ESCAPE)
        whole = escape if escape >= 0 and b"\n" not in self._pending[escape:] else len(self._pending)
        self._kept += strip_escapes(bytes(self._pending[:whole]))
        del self._pending[:whole]
        most = len(self._kept) - CONTEXT
        limit = self._kept.rfind(b"\n", self._at, max(self._at, most)) + 1 or most
        if limit > self._at:
            self._search(limit)

    def _search(self, limit: int) -> None:
        """Look at the lines up to there. A literal across the place where the last search ended is one of these."""
        data, at, matcher = self._kept, self._at, self._matcher
        self._tally.add_ranks(data, at, limit)
        self._trials.next_block()
        start = max(0, at - matcher.longest)
        for found in grouped(data, matcher.found(data[start:limit]), start, at, self._trials.skips):
            self._look(Spot(data, found, self._rank, self._written), matcher.owning(found.literals))
        for found in every(data, at, limit) if matcher.without_literal else ():
            self._look(Spot(data, found, self._rank, self._written), frozenset(matcher.without_literal))
        for pattern, count in self._trials.passed():
            self._tally.add_match_count(pattern, count)
        self._report(data, at, limit)
        newlines = data.count(b"\n", at, limit)
        self._number += newlines
        self._tally.lines += newlines
        drop = max(0, limit - CONTEXT)
        self._kept, self._at, self._base = data[drop:], limit - drop, self._base + drop
        self._counted = self._at, self._number

    def _number_at(self, place: int) -> int:
        """The number of the line there, which counts newlines as editors do."""
        counted, number = self._counted
        if place < counted:
            counted, number = self._at, self._number
        self._counted = max(place, counted), number + self._kept.count(b"\n", counted, place)
        return self._counted[1]

    def _look(self, spot: Spot, wanted: frozenset[int]) -> None:
        """Find out which of the wanted a line has. Of the pieces of an overlong line, the first that has it counts."""
        first, last, is_start, _ = spot.found
        line_at, looked_to = self._base + first, max(0, self._looked_to - self._base)
        if line_at != self._line_at if is_start else self._kept.find(b"\n", looked_to, first) >= 0:
            self._line_at = line_at
            self._seen.clear()
        self._looked_to = self._base + last
        for number in wanted:
            if number in self._seen:
                continue
            if number >= 0:
                self._try(number, spot)
            elif number == Matcher.TELLS:
                self._tally.add_watchdog_line(self._line(spot), spot.origin.text)
            elif number == Matcher.FAILURE:
                if self._trials.may_fail() and self._tally.add_failure(self._line(spot)):
                    self._seen.add(number)
            elif number == Matcher.BOXED:
                if self._trials.may_unbox():
                    self._look_in_box(spot)
            else:
                self._has_report = True

    def _try(self, number: int, spot: Spot) -> None:
        if not self._trials.may_try(number):
            return
        pattern = self._matcher.patterns[number]
        began = perf_counter()
        match = pattern.compiled.search(spot.text)
        if match is None and pattern.looks_behind:
            match = pattern.compiled.search(spot.origin.text)
        if match is None and pattern.reach and self._trials.may_look_around(number):
            match = next(
                filter(None, (window.search(pattern.compiled) for window in spot.windows(pattern.reach))), None
            )
        seconds = perf_counter() - began
        if seconds > SLOW_S and self._trials.took(number, seconds):
            said = f"{self._source}: a signature of {pattern.id} takes too long on this text and was set aside"
            self._tally.problems.append(said)
        if match:
            self._seen.add(number)
            self._trials.matched(number)
            self._tally.add_match(pattern, match.group(), self._line(spot))

    def _look_in_box(self, spot: Spot) -> None:
        """What rich drew: a frame as Python prints it, and the message below the box as one line."""
        line, bare = self._line(spot), unboxed(spot.origin.text)
        if bare != spot.origin.text:
            self._read(bare, line, spot)
        if len(spot.message) > 1:
            text = " ".join(spot.message)
            below = Line(line.source, line.number + 1, text[:LONGEST_EVIDENCE], line.rank, line.time)
            self._read(text, below, spot, spot.message)

    def _read(self, text: str, line: Line, spot: Spot, parts: Sequence[str] = ()) -> None:
        """Match a text that stands nowhere like this, but for what its parts have alone."""
        alone = {number for part in parts for number in self._matcher.may_match(part)}
        for number in self._matcher.may_match(text):
            pattern = self._matcher.patterns[number]
            if number in (alone if pattern.reach else self._seen) or not self._trials.may_try(number):
                continue
            if pattern.reach and self._trials.may_look_around(number):
                text = spot.windows(pattern.reach)[-1].before + text
            match = pattern.compiled.search(text)
            if match and not any(map(pattern.compiled.search, parts)):
                self._trials.matched(number)
                self._tally.add_match(pattern, match.group(), line)

    def _line(self, spot: Spot) -> Line:
        return self._line_of(spot.origin, self._number_at(spot.found.first))

    def _line_of(self, origin: LogLine, number: int) -> Line:
        learned = self._processes.rank(origin.text)
        rank = origin.rank if learned is None else learned
        return Line(self._source, number, origin.text.strip()[:LONGEST_EVIDENCE], rank, origin.time)

    def _report(self, data: bytes, start: int, end: int) -> None:
        if self._has_report and len(self.reports) < MOST_REPORTS and REPORTS.search(data, start, end):
            self.reports += data[start:end]
        self._has_report = False

    def _last_lines(self) -> Iterator[Line]:
        """The lines at the end that say something."""
        lines = self._kept[-TAIL:].split(b"\n")
        for number, line in enumerate(lines, self._number - len(lines) + 1):
            for text in line.decode("utf-8", "replace").split("\r"):
                origin = parse_prefix(text, self._written, self._rank)
                if origin.text.strip():
                    yield self._line_of(origin, number)
