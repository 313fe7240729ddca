"""The signatures of all entries, ready to be looked for in one pass: literals first, patterns where one occurs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ahocorasick_rs import BytesAhoCorasick, Implementation

from kb.diagnose import failing

SPANS_LINES = re.compile(r"\\n|\[\\s\\S\]|\[\\S\\s\]|\[\\w\\W\]|\(\?s")

# What a line has that tells how far a rank came: read by `kb.diagnose.collectives`.
TELLING = ("Watchdog caught collective", "ast enqueued", "(local_rank: ", "exitcode", " Init START", " Init COMPLETE")


@dataclass(frozen=True, slots=True)
class Pattern:
    """A signature as it is looked for. `spans_lines` when it has to see more than one line."""

    id: str
    role: str
    text: str
    compiled: re.Pattern[str]
    spans_lines: bool

    @classmethod
    def of(cls, signature: dict[str, Any]) -> Pattern:
        text = signature["pattern"]
        compiled = re.compile(text, re.MULTILINE)
        return cls(signature["id"], signature["role"], text, compiled, bool(SPANS_LINES.search(text)))


class Matcher:
    """Finds where a pattern may match. `FAILURE` and `TELLS` among the found stand for `failing.WORDS` and `TELLING`.

    A pattern without a literal (one that ignores case) is tried on the lines that report a failure.
    """

    FAILURE, TELLS = -1, -2

    def __init__(self, signatures: Iterable[dict[str, Any]]) -> None:
        owners: dict[bytes, set[int]] = {word.encode(): {self.FAILURE} for word in failing.WORDS}
        for word in TELLING:
            owners.setdefault(word.encode(), set()).add(self.TELLS)
        self.patterns: list[Pattern] = []
        self.without_literal: list[int] = []
        for number, signature in enumerate(signatures):
            self.patterns.append(Pattern.of(signature))
            for literal in signature["literals"]:
                owners.setdefault(literal.encode(), set()).add(number)
            if not signature["literals"]:
                self.without_literal.append(number)
        self._owners = [frozenset(numbers) for numbers in owners.values()]
        self._automaton = BytesAhoCorasick(list(owners), implementation=Implementation.DFA)

    def found(self, data: bytes) -> Iterator[tuple[int, int, frozenset[int]]]:
        """(start, end, numbers of patterns) of every literal in the data, by end."""
        owners = self._owners
        for number, start, end in self._automaton.find_matches_as_indexes(data, overlapping=True):
            yield start, end, owners[number]
