"""One pass over one log, in constant memory: the lines that hold a literal of a signature or report a failure.

A chunk is searched for all literals at once; only the lines around what is found are decoded, asked for rank and
time, and matched. A pattern that spans lines sees the lines of the same rank around the literal, as another rank's
output may stand between them. Work is bounded whatever the log holds: lines are cut, a flood of one signature is
counted without being matched again, and a pattern that takes long on a text is set aside and named.
"""

from __future__ import annotations

from collections.abc import Iterator
from time import perf_counter

from kb.diagnose.evidence import LONGEST_SHOWN, Line
from kb.diagnose.matcher import Matcher, Pattern
from kb.diagnose.prefix import Origin, parse, plain
from kb.diagnose.ranks import Processes
from kb.diagnose.tally import Tally
from kb.diagnose.traceback_box import unboxed

AROUND = 16 << 10  # bytes on either side of a literal that a pattern over several lines may see
LONGEST = 4096  # bytes of a line that are matched, around its literal
MOST_LOOKS = 64  # into one line
ENOUGH = 2000  # matches of a signature in one log that are verified; further literals are counted as such
MOST_WINDOWS = 200  # matches over several lines that are tried for one pattern
MOST_FAILURES = 20_000  # lines reporting a failure that are looked at
PATIENCE_S = 2.0  # for one pattern on one log


class Scanner:
    """Feed it the chunks of a log, which `kb.diagnose.source.chunks` cuts at line ends, then `close` it."""

    def __init__(self, matcher: Matcher, tally: Tally, source: str, rank: int | None, written: float | None) -> None:
        self._matcher, self._tally, self._source = matcher, tally, source
        self._rank, self._written = rank, written
        self._processes = Processes()
        self._kept = b""  # context, then what is not searched yet
        self._at = 0  # where that begins
        self._number = 1  # of the line there
        self._spent = [0.0] * len(matcher.patterns)
        self._tried = [0] * len(matcher.patterns)
        self._verified = [0] * len(matcher.patterns)
        self._failures = 0

    def feed(self, chunk: bytes) -> None:
        self._kept += plain(chunk)
        self._tally.keep(chunk)
        self._tally.bytes += len(chunk)
        limit = self._kept.rfind(b"\n", self._at, max(self._at, len(self._kept) - AROUND)) + 1
        if limit > self._at or len(self._kept) - self._at > 8 * AROUND:
            self._search(limit or len(self._kept) - AROUND)

    def close(self) -> None:
        end = self._kept[-LONGEST:]
        self._search(len(self._kept))
        is_whole = end.endswith((b"\n", b"\r"))
        self._tally.lines += not is_whole
        texts = end.decode("utf-8", "replace").splitlines()
        first = self._number - len(texts) + (not is_whole)
        lines = [self._line(parse(text, self._written, self._rank), first + n) for n, text in enumerate(texts)]
        self._tally.ended([line for line in lines if line.text], self._matcher.patterns)

    def _search(self, limit: int) -> None:
        data = self._kept
        end, number, counted, looks = -1, self._number, self._at, 0
        self._tally.saw_ranks(data, self._at, limit)
        for first, last, wanted in self._grouped(data, limit):
            number += data.count(b"\n", counted, first)
            counted = first
            looks = looks + 1 if first == end else 0
            end = last
            if looks < MOST_LOOKS:
                self._look(data, first, last, number, wanted)
        self._number += data.count(b"\n", self._at, limit)
        self._tally.lines += data.count(b"\n", self._at, limit)
        start = max(0, limit - AROUND)
        self._kept, self._at = data[start:], limit - start

    def _grouped(self, data: bytes, limit: int) -> Iterator[tuple[int, int, set[int]]]:
        """(start, end, what was found there) of every line, or piece of an overlong one, that holds a literal."""
        first, last, wanted = 0, -1, set[int]()
        for start, end, numbers in self._matcher.found(data[self._at : limit]):
            start, end = start + self._at, end + self._at
            if end > last:
                if wanted:
                    yield first, last, wanted
                first, last = _line_around(data, max(start, last) if start >= last else start, end)
                wanted = set()
            wanted |= numbers
        if wanted:
            yield first, last, wanted

    def _look(self, data: bytes, first: int, last: int, number: int, wanted: set[int]) -> None:
        text = data[first:last].decode("utf-8", "replace")
        origin = parse(text, self._written, self._rank)
        line = self._line(origin, number)
        if Matcher.TELLS in wanted:
            self._tally.told(line, origin.text)
        is_failure = Matcher.FAILURE in wanted and self._failures < MOST_FAILURES
        if is_failure:
            self._failures += 1
            self._tally.failed(line)
        for index in sorted(wanted - {Matcher.FAILURE, Matcher.TELLS}):
            self._try(index, self._matcher.patterns[index], (text, origin.text), data, first, last, line)
        for index in self._matcher.without_literal if is_failure else ():
            self._try(index, self._matcher.patterns[index], (text, origin.text), data, first, last, line)

    def _line(self, origin: Origin, number: int) -> Line:
        learned = self._processes.rank(origin.text)
        rank = origin.rank if learned is None else learned
        return Line(self._source, number, origin.text.strip()[:LONGEST_SHOWN], rank, origin.time)

    def _try(
        self, index: int, pattern: Pattern, texts: tuple[str, str], data: bytes, first: int, last: int, line: Line
    ) -> None:
        if self._verified[index] >= ENOUGH:
            self._tally.saw(pattern, "", line)
            return
        if self._spent[index] > PATIENCE_S or (pattern.spans_lines and self._tried[index] >= MOST_WINDOWS):
            return
        self._tried[index] += 1
        began = perf_counter()
        searched = (self._window(data, first, last),) if pattern.spans_lines else texts
        match = next((found for text in searched if (found := pattern.compiled.search(text))), None)
        self._spent[index] += perf_counter() - began
        if self._spent[index] > PATIENCE_S:
            self._tally.problems.append(
                f"{self._source}: a signature of {pattern.id} takes too long on this text and was set aside"
            )
        if match:
            self._verified[index] += 1
            self._tally.saw(pattern, match.group(), line)

    def _window(self, data: bytes, first: int, last: int) -> str:
        """The lines around one, those of other ranks left out, without prefixes."""
        before = data[max(0, first - AROUND) : first].decode("utf-8", "replace").splitlines()
        after = data[last : last + AROUND].decode("utf-8", "replace").splitlines()
        here = parse(data[first:last].decode("utf-8", "replace"), None, self._rank)
        lines = [parse(one, None, self._rank) for one in before]
        later = [parse(one, None, self._rank) for one in after]
        same = [one.text for one in lines if one.rank == here.rank]
        return unboxed("\n".join([*same, here.text, *(one.text for one in later if one.rank == here.rank)]))


def _line_around(data: bytes, start: int, end: int) -> tuple[int, int]:
    """Where the line around a literal begins and ends; no further away than half of `LONGEST`."""
    reach = LONGEST // 2
    low, high = max(0, start - reach), min(len(data), end + reach)
    first = max(data.rfind(b"\n", low, start), data.rfind(b"\r", low, start)) + 1 or low
    ends = [at for at in (data.find(b"\n", end, high), data.find(b"\r", end, high)) if at >= 0]
    return first, min(ends, default=high)
