"""The evidence that the scanners of all inputs have collected so far; `freeze` turns it into a `Scan`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from kb.diagnose.evidence import Failure, Line, SignatureMatch
from kb.diagnose.failure_lines import is_failure, is_interruption
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.signature_matcher import Pattern
from kb.diagnose.watchdog import WatchdogReader
from kb.search.query import LONGEST_TEXT, VOLATILE

MOST_LINES = 5  # cited per signature
MOST_FAILURES = 400  # distinct
MOST_RANKS = 16_384  # stored per signature
RANKS = re.compile(rb"\[(?:rank|default|Rank |RANK )(\d{1,5})\]")
CHANGING = re.compile(VOLATILE)
DIGITS = re.compile(r"\d+")


@dataclass(slots=True)
class _LineGroup:
    """Lines that count as one piece of evidence; `text` is what a signature matched first."""

    lines: list[Line] = field(default_factory=list)
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    text: str = ""

    def add(self, line: Line, most: int) -> None:
        self.count += 1
        if len(self.lines) < most and (line.rank is None or line.rank not in self.ranks or self.count <= 2):
            self.lines.append(line)
        if line.rank is not None and len(self.ranks) < MOST_RANKS:
            self.ranks.add(line.rank)


def _is_earlier(line: Line, other: Line) -> bool:
    return line.time is not None and other.time is not None and line.time < other.time


class Accumulator:
    """Merges many equal lines, of one rank or several, into one match or failure with a count."""

    def __init__(self) -> None:
        self.bytes = self.lines = self.sources = 0
        self.problems: list[str] = []
        self.observations: list[Line] = []
        self._matches: dict[tuple[str, str, str], _LineGroup] = {}
        self._failures: dict[str, _LineGroup] = {}
        self._ranks: set[bytes] = set()
        self._file_ranks: set[int] = set()
        self._watchdog = WatchdogReader()
        self._excerpt = bytearray()

    def add_match(self, pattern: Pattern, text: str, line: Line) -> None:
        """Add a line in which a signature matched `text`."""
        group = self._matches.setdefault((pattern.id, pattern.role, pattern.text), _LineGroup(text=text))
        group.add(line, MOST_LINES)

    def add_match_count(self, pattern: Pattern, count: int) -> None:
        """Count further matches of a signature that has matched so often that its lines are no longer stored."""
        self._matches[pattern.id, pattern.role, pattern.text].count += count

    def add_failure(self, line: Line) -> bool:
        """Add a line if it reports a failure; return whether it does."""
        if not is_failure(line.text):
            return False
        key = DIGITS.sub("0", CHANGING.sub(" ", line.text)).strip(" .:-")
        if key in self._failures or len(self._failures) < MOST_FAILURES:
            group = self._failures.setdefault(key, _LineGroup())
            group.add(line, 1)
            if _is_earlier(line, group.lines[0]):  # from another file that is read later
                group.lines[0] = line
        return True

    def add_watchdog_line(self, line: Line, text: str) -> None:
        """Add a line that reports how far a rank came or how it ended."""
        self._watchdog.read_line(line, text)

    def add_excerpt(self, data: bytes) -> None:
        """Store the text of short inputs, which is compared with the entries as a whole."""
        if len(self._excerpt) <= LONGEST_TEXT:
            self._excerpt += data[: LONGEST_TEXT + 1 - len(self._excerpt)]

    def end_log(self, lines: list[Line], patterns: Iterable[Pattern]) -> None:
        """Add the last lines of a log; a log that stops without a failure stops where the job hung."""
        while lines and is_interruption(lines[-1].text):
            lines.pop()
        for pattern in patterns:
            for line in lines[-1:]:
                if pattern.role == "context" and (match := pattern.compiled.search(line.text)):
                    self.add_match(replace(pattern, role="last"), match.group(), line)

    def add_file_rank(self, rank: int | None) -> None:
        """Add the rank of a file that is not empty, whether or not a line names the rank."""
        if rank is not None:
            self._file_ranks.add(rank)

    def add_ranks(self, data: bytes, start: int, end: int) -> None:
        """Add the ranks that prefixes name in this part of a log."""
        self._ranks.update(RANKS.findall(data, start, end))

    def freeze(self) -> Scan:
        """Everything, in the order of first appearance."""
        ranks = {int(rank) for rank in self._ranks} | self._file_ranks
        ranks.update(rank for group in (*self._matches.values(), *self._failures.values()) for rank in group.ranks)
        return Scan(
            matches=tuple(
                SignatureMatch(*key, group.text, group.count, tuple(sorted(group.ranks)), tuple(group.lines))
                for key, group in self._matches.items()
            ),
            failures=tuple(
                Failure(group.lines[0], group.count, tuple(sorted(group.ranks))) for group in self._failures.values()
            ),
            timeouts=tuple(self._watchdog.timeouts.values()),
            progress=tuple(self._watchdog.progress.values()),
            exits=tuple(self._watchdog.exits),
            observations=tuple(self.observations),
            ranks=tuple(sorted(ranks)),
            sources=self.sources,
            lines=self.lines,
            bytes=self.bytes,
            problems=tuple(self.problems),
            text=self._excerpt.decode("utf-8", "replace") if len(self._excerpt) <= LONGEST_TEXT else "",
        )
