"""A line that is looked at, and what is around it: for patterns over several lines, and messages that rich wrapped.

Another rank's output may stand between the lines of one, so that there are two ways to see what is around: all
lines as they stand, and those of the same rank without their prefixes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from kb.diagnose.scan.literal_hits import Found
from kb.diagnose.scan.log_prefix import LogLine, parse_prefix
from kb.diagnose.scan.rich_traceback import unboxed

MESSAGE = 16 << 10  # bytes below a box in which its message is looked for
MOST_WRAPPED = 24  # lines of one message
ENDS = re.compile("\r\n|\r")


@dataclass(frozen=True, slots=True)
class Window:
    """Text with a line in it, and where that line begins and ends there."""

    text: str
    start: int
    end: int

    @classmethod
    def of(cls, before: Sequence[str], here: str, after: Sequence[str]) -> Window:
        front, middle = unboxed("\n".join(before)), unboxed(here)
        return cls(front + middle + unboxed("\n".join(after)), len(front), len(front) + len(middle))

    @property
    def before(self) -> str:
        return self.text[: self.start]

    def search(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The first match that has something of the line."""
        match = next((match for match in pattern.finditer(self.text) if match.end() > self.start), None)
        return match if match and match.start() < self.end else None


class Spot:
    """A line in `data`; all that costs time is made when it is asked for. `rank` and `written` are the log's."""

    def __init__(self, data: bytes, found: Found, rank: int | None, written: float | None) -> None:
        self.found = found
        self.text = data[found.first : found.last].decode("utf-8", "replace")
        self._data, self._rank, self._written = data, rank, written
        self._windows: dict[int, tuple[Window, ...]] = {}

    @cached_property
    def origin(self) -> LogLine:
        return parse_prefix(self.text, self._written, self._rank)

    def windows(self, reach: int) -> tuple[Window, ...]:
        """What is around, in the two ways; one if they are the same. `reach`: bytes on either side."""
        if reach not in self._windows:
            before, after = self._before(reach), self._after(reach)
            self._windows[reach] = (Window.of(before, self.text, after),)
            if self.origin.text != self.text:
                same = Window.of(self._of_rank(before), self.origin.text, self._of_rank(after))
                self._windows[reach] += (same,)
        return self._windows[reach]

    @cached_property
    def message(self) -> list[str]:
        """The lines of the message below a box whose lower border this is, else none."""
        return list(self._message()) if self.origin.text.lstrip().startswith("╰") else []

    def _message(self) -> Iterator[str]:
        """Up to a blank line, the next box, or a line that begins as loggers do."""
        lines = (parse_prefix(line, None, self._rank) for line in self._after(MESSAGE)[1:])
        for number, line in enumerate(line for line in lines if line.rank == self.origin.rank):
            text = line.text.strip()
            is_new = number and (line.time is not None or text.startswith("["))
            if not text or text[0] in "╭│╰" or is_new or number == MOST_WRAPPED:
                return
            yield text

    def _before(self, reach: int) -> list[str]:
        return _lines(self._data[max(0, self.found.first - reach) : self.found.first])

    def _after(self, reach: int) -> list[str]:
        return _lines(self._data[self.found.last : self.found.last + reach])

    def _of_rank(self, lines: Sequence[str]) -> list[str]:
        """Those of the same rank, without prefixes; an empty one is what joins the others to the line between."""
        prefix = self.text.removesuffix(self.origin.text)
        if self.origin.time is None:
            return [line.removeprefix(prefix) for line in lines if not line or line.startswith(prefix)]
        parsed = (parse_prefix(line, None, self._rank) if line else None for line in lines)
        return [one.text if one else "" for one in parsed if one is None or one.rank == self.origin.rank]


def _lines(data: bytes) -> list[str]:
    return ENDS.sub("\n", data.decode("utf-8", "replace")).split("\n")
