"""The signatures of all entries, ready to be looked for in one pass: literals first, patterns where one occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ahocorasick_rs import BytesAhoCorasick, Implementation

from kb.diagnose import failure_lines
from kb.patterns.literals import last_literals
from kb.patterns.multiline import looks_behind, spans_lines, spans_text

FAR, NEAR = 64 << 10, 2 << 10  # bytes on either side of a line

# What a line has that tells how far a rank came: read by `kb.diagnose.watchdog`.
TELLING = ("Watchdog caught collective", "ast enqueued", "(local_rank: ", "exitcode", " Init START", " Init COMPLETE")
BOX = ("│", "╰")  # of rich's tracebacks
REPORT = ("most recent call first)", '"thread_id":', " (idle", " (active", "Communicators...")  # stacks, RAS


@dataclass(frozen=True, slots=True)
class Pattern:
    """A signature as it is looked for: in a line, with its prefix or without, or in the lines around it.

    `reach` is how many bytes around the line a match may hold, `looks_behind` whether a prefix in front may hide it.
    """

    id: str
    role: str
    text: str
    compiled: re.Pattern[str]
    reach: int
    looks_behind: bool

    @classmethod
    def of(cls, signature: dict[str, Any]) -> Pattern:
        text = signature["pattern"]
        compiled = re.compile(text, re.MULTILINE)
        reach = 0 if not spans_lines(text) else FAR if spans_text(text) else NEAR
        return cls(signature["id"], signature["role"], text, compiled, reach, looks_behind(text))


class Matcher:
    """Finds literals, each of which belongs to some patterns, by number, or to one of the kinds of lines below 0.

    A pattern without a literal (one that ignores case) has to be tried on every line.
    """

    FAILURE, TELLS, BOXED, REPORT = -1, -2, -3, -4

    def __init__(self, signatures: Iterable[dict[str, Any]]) -> None:
        owners: dict[bytes, set[int]] = {}
        for kind, words in zip((-1, -2, -3, -4), (failure_lines.WORDS, TELLING, BOX, REPORT), strict=True):
            _own(owners, words, kind)
        self.patterns: list[Pattern] = []
        self.without_literal: list[int] = []
        for number, signature in enumerate(signatures):
            pattern = Pattern.of(signature)
            self.patterns.append(pattern)
            texts = last_literals(pattern.text) if pattern.reach else signature["literals"]
            lines = [max(text.split("\n"), key=len) for text in texts]
            if not all(lines) or not lines:
                self.without_literal.append(number)
            _own(owners, filter(None, lines), number)
        self.owners = [frozenset(numbers) for numbers in owners.values()]
        self.longest = max(map(len, owners))  # bytes of a literal
        self._automaton = BytesAhoCorasick(list(owners), implementation=Implementation.DFA)

    def found(self, data: bytes) -> list[tuple[int, int, int]]:
        """(which of `owners`, start, end) of every literal in the data, by end."""
        return self._automaton.find_matches_as_indexes(data, overlapping=True)

    def owning(self, literals: set[int]) -> frozenset[int]:
        """The patterns and kinds that these belong to."""
        if len(literals) == 1:
            return self.owners[next(iter(literals))]
        return frozenset[int]().union(*(self.owners[literal] for literal in literals))

    def may_match(self, text: str) -> list[int]:
        """The patterns whose literal a text has, and those that have none."""
        numbers = self.owning({literal for literal, _, _ in self.found(text.encode("utf-8", "replace"))})
        return sorted(number for number in numbers.union(self.without_literal) if number >= 0)

    def matches(self, text: str) -> Iterator[tuple[Pattern, re.Match[str]]]:
        """Every pattern that matches a text, once."""
        for number in self.may_match(text):
            if match := self.patterns[number].compiled.search(text):
                yield self.patterns[number], match


def _own(owners: dict[bytes, set[int]], texts: Iterable[str], number: int) -> None:
    for text in texts:
        owners.setdefault(text.encode(), set()).add(number)
