"""Scans a log, in one pass and constant memory, for lines with a literal of a signature and for failure lines.

A block is searched for all literals at once. Only the lines with hits are decoded and matched, and rank and time are
parsed only for matches and failure lines. The work is bounded for any log. In an overlong line, only the text around
each literal is examined. Many matches of one signature are counted without matching each line. A pattern that takes too
long is set aside and reported. If every line may match many patterns, only samples are examined, which is reported too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice
from time import perf_counter

from kb.diagnose.evidence import LONGEST_EVIDENCE, Line
from kb.diagnose.scan.accumulator import Accumulator
from kb.diagnose.scan.line_window import CandidateLine
from kb.diagnose.scan.literal_hits import spans_of_hits, spans_of_lines
from kb.diagnose.scan.log_prefix import LogLine, parse_prefix, strip_escapes
from kb.diagnose.scan.match_budget import SLOW_S, MatchBudget
from kb.diagnose.scan.nccl_processes import NcclProcesses
from kb.diagnose.scan.rich_traceback import unboxed
from kb.diagnose.scan.signature_matcher import FAR, Matcher
from kb.diagnose.story.excerpt import ExcerptBuilder

CONTEXT = FAR  # bytes buffered on either side of the searched part
BLOCK = 1 << 20  # bytes that are searched at a time
LONGEST_ESCAPE = 64  # bytes of an escape sequence
TAIL = 4096  # bytes that are searched for the last line
REPORTS = re.compile(
    rb"most recent call first\)|Thread \d{1,20} \((?:idle|active)|\"thread_id\":|^Communicators\.\.\.", re.MULTILINE
)
MARKED = frozenset({Matcher.STORY, Matcher.FAILURE, Matcher.BOX, Matcher.PROGRESS})  # kinds of lines in the excerpt
MAX_REPORT_BYTES = 8 << 20  # per log, stored for the readers of stacks and RAS reports


class Scanner:
    """`feed` it a log in pieces, cut anywhere, then `close` it.

    `reports` then has the parts of the log with stacks or RAS reports, `excerpt` the parts that its story is read from.
    """

    def __init__(
        self,
        matcher: Matcher,
        evidence: Accumulator,
        source: str,
        rank: int | None,
        written: float | None,
        excerpt: ExcerptBuilder,
    ) -> None:
        self._matcher, self._evidence, self._source = matcher, evidence, source
        self._rank, self._written, self._excerpt = rank, written, excerpt
        self._processes = NcclProcesses()
        self._budget = MatchBudget(matcher)
        self._pending = bytearray()  # less than a block
        self._buffer = b""  # context, then bytes that have not been searched
        self._searched = 0  # bytes of the buffer that have been searched
        self._offset = 0  # position of the buffer in the log without colours
        self._line_number = 1  # at `_searched`
        self._counted = 0, 1  # a later position in the buffer and its line number
        self._line_start = self._examined_to = -1  # of the last examined line, in the log
        self._matched = set[int]()  # patterns and kinds of that line
        self._has_report = False
        self._marks: list[tuple[int, int]] = []  # positions in the buffer of lines for the excerpt
        self.reports = b""

    def feed(self, piece: bytes) -> None:
        self._evidence.add_excerpt(piece)
        self._evidence.bytes += len(piece)
        for start in range(0, len(piece), BLOCK):
            self._pending += piece[start : start + BLOCK]
            if len(self._pending) >= BLOCK:
                self._search_pending()

    def close(self) -> None:
        self._buffer += strip_escapes(bytes(self._pending))
        self._budget.last_block()
        self._search(len(self._buffer))
        if self._budget.is_sampled:
            self._evidence.problems.append(
                f"{self._source}: so many of its lines may match that of a part only samples were examined"
            )
        self._evidence.lines += bool(self._buffer) and not self._buffer.endswith(b"\n")
        self._evidence.end_log(list(self._last_lines()), self._matcher.patterns)

    def _search_pending(self) -> None:
        """Search the pending bytes except the last `CONTEXT` bytes, whose lines may continue."""
        escape = self._pending.rfind(b"\x1b", len(self._pending) - LONGEST_ESCAPE)
        whole = escape if escape >= 0 and b"\n" not in self._pending[escape:] else len(self._pending)
        self._buffer += strip_escapes(bytes(self._pending[:whole]))
        del self._pending[:whole]
        latest = len(self._buffer) - CONTEXT
        limit = self._buffer.rfind(b"\n", self._searched, max(self._searched, latest)) + 1 or latest
        if limit > self._searched:
            self._search(limit)

    def _search(self, limit: int) -> None:
        """Examine the lines up to `limit`, including a literal that crosses the end of the last search."""
        data, at, matcher = self._buffer, self._searched, self._matcher
        self._evidence.add_ranks(data, at, limit)
        self._budget.next_block()
        start = max(0, at - matcher.longest)
        hits = matcher.find_literals(data[start:limit])
        stride = self._budget.stride(limit - at)
        for span in islice(spans_of_hits(data, hits, start, at, self._budget.is_skipped), 0, None, stride):
            self._examine(CandidateLine(data, span, self._rank, self._written), matcher.owners_of(span.literals))
        for span in islice(spans_of_lines(data, at, limit), 0, None, stride) if matcher.without_literal else ():
            self._examine(CandidateLine(data, span, self._rank, self._written), frozenset(matcher.without_literal))
        self._add_to_excerpt(data, at, limit)
        for pattern, count in self._budget.take_skipped():
            self._evidence.add_match_count(pattern, count)
        self._add_report(data, at, limit)
        newlines = data.count(b"\n", at, limit)
        self._line_number += newlines
        self._evidence.lines += newlines
        drop = max(0, limit - CONTEXT)
        self._buffer, self._searched, self._offset = data[drop:], limit - drop, self._offset + drop
        self._counted = self._searched, self._line_number

    def _line_number_at(self, position: int) -> int:
        """The line number at a position of the buffer, counting newlines as editors do."""
        counted, number = self._counted
        if position < counted:
            counted, number = self._searched, self._line_number
        self._counted = max(position, counted), number + self._buffer.count(b"\n", counted, position)
        return self._counted[1]

    def _examine(self, candidate: CandidateLine, owners: frozenset[int]) -> None:
        """Try these patterns and kinds on a line. Each counts once per line, even if an overlong line is in pieces."""
        first, last, is_start, _ = candidate.span
        line_start, examined_to = self._offset + first, max(0, self._examined_to - self._offset)
        if line_start != self._line_start if is_start else self._buffer.find(b"\n", examined_to, first) >= 0:
            self._line_start = line_start
            self._matched.clear()
        self._examined_to = self._offset + last
        if not owners.isdisjoint(MARKED):
            self._marks.append((first, last))
        for number in owners:
            if number in self._matched:
                continue
            if number >= 0:
                self._try(number, candidate)
            elif number == Matcher.PROGRESS:
                self._evidence.add_watchdog_line(self._line(candidate), candidate.log_line.text)
            elif number == Matcher.FAILURE:
                if self._budget.may_examine_failure() and self._evidence.add_failure(self._line(candidate)):
                    self._matched.add(number)
            elif number == Matcher.BOX:
                if self._budget.may_examine_box():
                    self._examine_box(candidate)
            elif number == Matcher.REPORT:
                self._has_report = True

    def _try(self, number: int, candidate: CandidateLine) -> None:
        if not self._budget.may_try(number):
            return
        pattern = self._matcher.patterns[number]
        began = perf_counter()
        match = pattern.compiled.search(candidate.text)
        if match is None and pattern.looks_behind:
            match = pattern.compiled.search(candidate.log_line.text)
        if match is None and pattern.reach and self._budget.may_search_windows(number):
            match = next(
                filter(None, (window.search(pattern.compiled) for window in candidate.windows(pattern.reach))), None
            )
        seconds = perf_counter() - began
        if seconds > SLOW_S and self._budget.charge(number, seconds):
            problem = f"{self._source}: a signature of {pattern.id} takes too long on this text and was set aside"
            self._evidence.problems.append(problem)
        if match:
            self._matched.add(number)
            self._budget.count_match(number)
            self._evidence.add_match(pattern, match.group(), self._line(candidate))

    def _examine_box(self, candidate: CandidateLine) -> None:
        """Match the frames of rich's box as Python prints them, and the message below the box as one line."""
        line, text = self._line(candidate), unboxed(candidate.log_line.text)
        if text != candidate.log_line.text:
            self._match_text(text, line, candidate)
        if len(candidate.message) > 1:
            message = " ".join(candidate.message)
            below = Line(line.source, line.number + 1, message[:LONGEST_EVIDENCE], line.rank, line.time)
            self._match_text(message, below, candidate, candidate.message)

    def _match_text(self, text: str, line: Line, candidate: CandidateLine, parts: Sequence[str] = ()) -> None:
        """Match a text that the log does not contain in this form; its parts are matched elsewhere, one by one."""
        in_parts = {number for part in parts for number in self._matcher.may_match(part)}
        for number in self._matcher.may_match(text):
            pattern = self._matcher.patterns[number]
            if number in (in_parts if pattern.reach else self._matched) or not self._budget.may_try(number):
                continue
            has_window = pattern.reach and self._budget.may_search_windows(number)
            before = candidate.windows(pattern.reach)[-1].before if has_window else ""
            match = pattern.compiled.search(before + text)
            if match and not any(map(pattern.compiled.search, parts)):
                self._budget.count_match(number)
                self._evidence.add_match(pattern, match.group(), line)

    def _add_to_excerpt(self, data: bytes, start: int, end: int) -> None:
        marks = [(max(0, first - start), last - start) for first, last in self._marks if last > start]
        self._marks.clear()
        self._excerpt.add(data[start:end], self._line_number, marks)

    def _line(self, candidate: CandidateLine) -> Line:
        return self._line_of(candidate.log_line, self._line_number_at(candidate.span.first))

    def _line_of(self, log_line: LogLine, number: int) -> Line:
        process_rank = self._processes.rank(log_line.text)
        rank = log_line.rank if process_rank is None else process_rank
        time = log_line.time - self._excerpt.ahead_s if log_line.time is not None else None
        return Line(self._source, number, log_line.text.strip()[:LONGEST_EVIDENCE], rank, time)

    def _add_report(self, data: bytes, start: int, end: int) -> None:
        if self._has_report and len(self.reports) < MAX_REPORT_BYTES and REPORTS.search(data, start, end):
            self.reports += data[start:end]
        self._has_report = False

    def _last_lines(self) -> Iterator[Line]:
        """The nonblank lines at the end of the log."""
        lines = self._buffer[-TAIL:].split(b"\n")
        for number, line in enumerate(lines, self._line_number - len(lines) + 1):
            for text in line.decode("utf-8", "replace").split("\r"):
                log_line = parse_prefix(text, self._written, self._rank)
                if log_line.text.strip():
                    yield self._line_of(log_line, number)
