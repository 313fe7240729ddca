"""A line with the lines around it, for patterns that span several lines and messages that rich wrapped.

The lines of one rank may be interleaved with those of others. Therefore there are two windows: all lines as printed,
and the lines of the same rank without their prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kb.diagnose.scan.literal_hits import LineSpan
from kb.diagnose.scan.log_prefix import LogLine, parse_prefix
from kb.diagnose.scan.rich_traceback import unboxed

MESSAGE_REACH = 16 << 10  # bytes after a box that are searched for its message
MAX_WRAPPED_LINES = 24  # per message
LINE_END = re.compile("\r\n|\r")


@dataclass(frozen=True, slots=True)
class Window:
    """The text around a line, and where the line starts and ends in it."""

    text: str
    start: int
    end: int

    @classmethod
    def of(cls, before: Sequence[str], line: str, after: Sequence[str]) -> Window:
        front, middle = unboxed("\n".join(before)), unboxed(line)
        return cls(front + middle + unboxed("\n".join(after)), len(front), len(front) + len(middle))

    @property
    def before(self) -> str:
        return self.text[: self.start]

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first match that overlaps the line."""
        match = next((match for match in pattern.finditer(self.text) if match.end() > self.start), None)
        return match if match and match.start() < self.end else None


class CandidateLine:
    """A line in `data` that may match; the rest is computed on demand. `rank` and `written` belong to the log."""

    def __init__(self, data: bytes, span: LineSpan, rank: int | None, written: float | None) -> None:
        self.span = span
        self.text = data[span.first : span.last].decode("utf-8", "replace")
        self._data, self._rank, self._written = data, rank, written
        self._windows: dict[int, tuple[Window, ...]] = {}

    @cached_property
    def log_line(self) -> LogLine:
        return parse_prefix(self.text, self._written, self._rank)

    def windows(self, reach: int) -> tuple[Window, ...]:
        """Both windows, or one if they are equal. `reach` is in bytes on either side."""
        if reach not in self._windows:
            before, after = self._before(reach), self._after(reach)
            self._windows[reach] = (Window.of(before, self.text, after),)
            if self.log_line.text != self.text:
                window = Window.of(self._lines_of_rank(before), self.log_line.text, self._lines_of_rank(after))
                self._windows[reach] += (window,)
        return self._windows[reach]

    @cached_property
    def message(self) -> list[str]:
        """The lines of the message below a box if this line is its lower border, else none."""
        return list(self._message()) if self.log_line.text.lstrip().startswith("╰") else []

    def _message(self) -> Iterator[str]:
        """The lines up to a blank line, the next box, or a line that starts like a logger's."""
        lines = (parse_prefix(line, None, self._rank) for line in self._after(MESSAGE_REACH)[1:])
        for number, line in enumerate(line for line in lines if line.rank == self.log_line.rank):
            text = line.text.strip()
            is_new = number and (line.time is not None or text.startswith("["))
            if not text or text[0] in "╭│╰" or is_new or number == MAX_WRAPPED_LINES:
                return
            yield text

    def _before(self, reach: int) -> list[str]:
        return _lines(self._data[max(0, self.span.first - reach) : self.span.first])

    def _after(self, reach: int) -> list[str]:
        return _lines(self._data[self.span.last : self.span.last + reach])

    def _lines_of_rank(self, lines: Sequence[str]) -> list[str]:
        """The lines of the same rank without prefixes. Empty lines stay: they join the rest to the line itself."""
        prefix = self.text.removesuffix(self.log_line.text)
        if self.log_line.time is None:
            return [line.removeprefix(prefix) for line in lines if not line or line.startswith(prefix)]
        parsed = (parse_prefix(line, None, self._rank) if line else None for line in lines)
        return [line.text if line else "" for line in parsed if line is None or line.rank == self.log_line.rank]


def _lines(data: bytes) -> list[str]:
    return LINE_END.sub("\n", data.decode("utf-8", "replace")).split("\n")
