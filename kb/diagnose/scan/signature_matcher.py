"""Matches the signatures of all entries in one pass: first literals, then the patterns whose literals occur."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from ahocorasick_rs import BytesAhoCorasick, Implementation

from kb.diagnose import failure_lines
from kb.patterns.literals import compiled, last_literals
from kb.patterns.multiline import looks_behind, spans_lines, spans_text

FAR, NEAR = 64 << 10, 2 << 10  # bytes on either side of a line

# Words of lines that report the progress or the exit of a rank, for `kb.diagnose.watchdog`.
PROGRESS_WORDS = (
    "Watchdog caught collective",
    "Aborting process on rank",
    "Operation timed out after ",
    "ast enqueued",
    "(local_rank: ",
    "exitcode",
    " Init START",
    " Init COMPLETE",
)
BOX_CHARACTERS = ("│", "╰")  # in rich's tracebacks
# For the story of a job (`kb.diagnose.story`): frames of tracebacks, values that are not finite.
STORY_WORDS = ('  File "', " nan", "=nan", ":nan", "NaN", " inf ", " inf,", "=inf", ":inf", " -inf")
REPORT_WORDS = ("most recent call first)", '"thread_id":', " (idle", " (active", "Communicators...")  # stacks, RAS


@dataclass(frozen=True, slots=True)
class Pattern:
    """A signature of entry `id`; it is searched for in a line, with or without its prefix, or in the lines around it.

    `reach`: bytes on either side of the line that a match may include. `looks_behind`: a prefix may hide a match.
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
        reach = 0 if not spans_lines(text) else FAR if spans_text(text) else NEAR
        return cls(signature["id"], signature["role"], text, compiled(text), reach, looks_behind(text))


class Matcher:
    """Finds literals. The owners of a literal are the numbers of patterns and, negative, the kinds of lines.

    A pattern without a literal (one that ignores case) is tried on every line.
    """

    FAILURE, PROGRESS, BOX, REPORT, STORY = -1, -2, -3, -4, -5
    KINDS: ClassVar = {
        FAILURE: failure_lines.WORDS,
        PROGRESS: PROGRESS_WORDS,
        BOX: BOX_CHARACTERS,
        REPORT: REPORT_WORDS,
        STORY: STORY_WORDS,
    }

    def __init__(self, signatures: Iterable[dict[str, Any]]) -> None:
        owners: dict[bytes, set[int]] = {}
        for kind, words in self.KINDS.items():
            _add_owner(owners, words, kind)
        self.patterns: list[Pattern] = []
        self.without_literal: list[int] = []
        for number, signature in enumerate(signatures):
            pattern = Pattern.of(signature)
            self.patterns.append(pattern)
            texts = last_literals(pattern.text) if pattern.reach else signature["literals"]
            lines = [max(text.split("\n"), key=len) for text in texts]
            if not all(lines) or not lines:
                self.without_literal.append(number)
            _add_owner(owners, filter(None, lines), number)
        self.owners = [frozenset(numbers) for numbers in owners.values()]
        self.longest = max(map(len, owners))  # bytes of a literal
        self._automaton = BytesAhoCorasick(list(owners), implementation=Implementation.DFA)

    def find_literals(self, data: bytes) -> list[tuple[int, int, int]]:
        """(index in `owners`, start, end) of each literal in the data, sorted by end."""
        return self._automaton.find_matches_as_indexes(data, overlapping=True)

    def owners_of(self, literals: set[int]) -> frozenset[int]:
        """The patterns and kinds of lines that these literals belong to."""
        if len(literals) == 1:
            return self.owners[next(iter(literals))]
        return frozenset[int]().union(*(self.owners[literal] for literal in literals))

    def may_match(self, text: str) -> list[int]:
        """The patterns with a literal in the text, and those without literals."""
        numbers = self.owners_of({literal for literal, _, _ in self.find_literals(text.encode("utf-8", "replace"))})
        return sorted(number for number in numbers.union(self.without_literal) if number >= 0)

    def matches(self, text: str) -> Iterator[tuple[Pattern, re.Match[str]]]:
        """Every pattern that matches a text, with its first match."""
        for number in self.may_match(text):
            if match := self.patterns[number].compiled.search(text):
                yield self.patterns[number], match


def _add_owner(owners: dict[bytes, set[int]], texts: Iterable[str], number: int) -> None:
    for text in texts:
        owners.setdefault(text.encode(), set()).add(number)
