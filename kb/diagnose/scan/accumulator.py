"""What the scanners of all sources have found so far; `scan` freezes it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kb.diagnose.evidence import Failure, Line, Scan, Sighting
from kb.diagnose.failure_lines import is_failure, is_interruption
from kb.diagnose.scan.signature_matcher import Pattern
from kb.diagnose.watchdog import Reading
from kb.search.query import LONGEST_TEXT, VOLATILE

MOST_LINES = 5  # cited for one signature
MOST_FAILURES = 400  # distinct
MOST_RANKS = 16_384  # remembered for one signature
RANKS = re.compile(rb"\[(?:rank|default|Rank |RANK )(\d{1,5})\]")
CHANGING = re.compile(VOLATILE)
DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class _Seen:
    """Lines that count as one piece of evidence."""

    lines: list[Line] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    match: str = ""

    def add(self, line: Line, most: int) -> None:
        self.count += 1
        if len(self.lines) < most and (line.rank is None or line.rank not in self.ranks or self.count <= 2):
            self.lines.append(line)
        if line.rank is not None and len(self.ranks) < MOST_RANKS:
            self.ranks.add(line.rank)


def _is_earlier(line: Line, other: Line) -> bool:
    return line.time is not None and other.time is not None and line.time < other.time


class Tally:
    """Collects; a flood of equal lines, of one rank or of many, becomes one sighting or failure with a count."""

    def __init__(self) -> None:
        self.bytes = self.lines = self.sources = 0
        self.problems: list[str] = []
        self.observations: list[Line] = []
        self._sightings: dict[tuple[str, str, str], _Seen] = {}
        self._failures: dict[str, _Seen] = {}
        self._ranks: set[bytes] = set()
        self._files: set[int] = set()
        self._reading = Reading()
        self._excerpt = bytearray()

    def saw(self, pattern: Pattern, match: str, line: Line) -> None:
        """A signature matched."""
        seen = self._sightings.setdefault((pattern.id, pattern.role, pattern.text), _Seen(match=match))
        seen.add(line, MOST_LINES)

    def more(self, pattern: Pattern, count: int) -> None:
        """It matched so often already that further lines are only counted."""
        self._sightings[pattern.id, pattern.role, pattern.text].count += count

    def failed(self, line: Line) -> bool:
        """A line that may report a failure; whether it does."""
        if not is_failure(line.text):
            return False
        key = DIGITS.sub("0", CHANGING.sub(" ", line.text)).strip(" .:-")
        if key in self._failures or len(self._failures) < MOST_FAILURES:
            seen = self._failures.setdefault(key, _Seen())
            seen.add(line, 1)
            if _is_earlier(line, seen.lines[0]):  # of another file, read later
                seen.lines[0] = line
        return True

    def told(self, line: Line, text: str) -> None:
        """A line that says how far a rank came or how it ended."""
        self._reading.take(line, text)

    def keep(self, data: bytes) -> None:
        """What is short enough to be read whole is compared with the entries whole."""
        if len(self._excerpt) <= LONGEST_TEXT:
            self._excerpt += data[: LONGEST_TEXT + 1 - len(self._excerpt)]

    def ended(self, lines: list[Line], patterns: Iterable[Pattern]) -> None:
        """The last lines of a log. Where it stopped without a word is where it hung."""
        while lines and is_interruption(lines[-1].text):
            lines.pop()
        for pattern in patterns:
            for line in lines[-1:]:
                if pattern.role == "context" and (match := pattern.compiled.search(line.text)):
                    self.saw(replace(pattern, role="last"), match.group(), line)

    def printed(self, rank: int | None) -> None:
        """A file of this rank holds something, whether a line of it says so or not."""
        if rank is not None:
            self._files.add(rank)

    def saw_ranks(self, data: bytes, start: int, end: int) -> None:
        self._ranks.update(RANKS.findall(data, start, end))

    def scan(self) -> Scan:
        """All of it, in the order of first appearance."""
        named = {int(rank) for rank in self._ranks} | self._files
        told = {rank for seen in (*self._sightings.values(), *self._failures.values()) for rank in seen.ranks}
        return Scan(
            sightings=tuple(
                Sighting(*key, seen.match, seen.count, tuple(sorted(seen.ranks)), tuple(seen.lines))
                for key, seen in self._sightings.items()
            ),
            failures=tuple(
                Failure(seen.lines[0], seen.count, tuple(sorted(seen.ranks))) for seen in self._failures.values()
            ),
            timeouts=tuple(self._reading.timeouts.values()),
            progress=tuple(self._reading.progress.values()),
            exits=tuple(self._reading.exits),
            observations=tuple(self.observations),
            ranks=tuple(sorted(named | told)),
            sources=self.sources,
            lines=self.lines,
            bytes=self.bytes,
            problems=tuple(self.problems),
            text=self._excerpt.decode("utf-8", "replace") if len(self._excerpt) <= LONGEST_TEXT else "",
        )
