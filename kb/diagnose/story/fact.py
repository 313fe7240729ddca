"""Facts: sentences that kb derives by comparing the ranks of a job."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kb.diagnose.evidence import DERIVED_PREFIX, LONGEST_EVIDENCE, Line
from kb.printable import printable


class FactKind(StrEnum):
    """The kind of a fact. The names are stable: `kb diagnose --json` prints them, docs/hang.md explains them."""

    OWN_FAILURE = "own-failure"
    KILLED = "killed"
    EXIT = "exit"
    ALL_LOST = "all-lost"
    BUSY = "busy"
    SILENT = "silent"
    DONE = "done"
    PLACES_DIFFER = "places-differ"
    PATHS_PART = "paths-part"
    LEFT_LOOP = "left-loop"
    DRIFTED = "drifted"
    SIZES_DIFFER = "sizes-differ"
    SIZES_DIFFER_IN_CALL = "sizes-differ-in-call"
    NOT_FINITE = "not-finite"
    ZERO = "zero"
    CONSTANT = "constant"
    SAME_PLACE = "same-place"
    CAME_LAST = "came-last"
    ONE_PLACE = "one-place"
    STEPS_BEHIND = "steps-behind"
    LAUNCHER = "launcher"
    RESTARTS = "restarts"
    RECOVERED = "recovered"
    JUMP = "jump"
    SLOWER = "slower"
    RESUMED_ABOVE = "resumed-above"
    SKEW = "skew"


# A rank did not come to the call in which the others wait.
ABSENT = (FactKind.BUSY, FactKind.SILENT, FactKind.DONE)
# Facts that explain why others wait; a rank without a traceback is then just one of those that the launcher ended.
EXPLANATIONS = (
    FactKind.OWN_FAILURE,
    FactKind.KILLED,
    FactKind.DRIFTED,
    FactKind.SIZES_DIFFER,
    FactKind.SIZES_DIFFER_IN_CALL,
    FactKind.EXIT,
)
# Trends of a metric that a healthy job may have too.
TRENDS = (FactKind.SLOWER, FactKind.JUMP, FactKind.RECOVERED)
# A healthy job may have these facts too, or the reason is elsewhere.
CONTEXT = (
    FactKind.RECOVERED,
    FactKind.JUMP,
    FactKind.SLOWER,
    FactKind.SKEW,
    FactKind.LAUNCHER,
    FactKind.STEPS_BEHIND,
    FactKind.RESTARTS,
    FactKind.ONE_PLACE,
    FactKind.SAME_PLACE,
)


@dataclass(frozen=True, slots=True)
class Fact:
    """A conclusion about the ranks of a job, as a fixed sentence that signatures of entries match.

    `kind` is stable; `text` is one line that begins with `kb: `. `ranks` are the ranks that the sentence blames, if
    any. `lines` are its evidence, the decisive line last.
    """

    kind: FactKind
    text: str
    ranks: tuple[int, ...]
    lines: tuple[Line, ...]

    @classmethod
    def of(cls, kind: FactKind, text: str, ranks: tuple[int, ...], *lines: Line) -> Fact:
        return cls(kind, printable(f"{DERIVED_PREFIX}{text}"[:LONGEST_EVIDENCE]), ranks, lines)

    @property
    def is_context(self) -> bool:
        """Whether a healthy job may have it too, or the reason is elsewhere."""
        return self.kind in CONTEXT

    @property
    def evidence(self) -> Line:
        """The sentence, at the place of its decisive line."""
        line = self.lines[-1]
        rank = self.ranks[0] if len(self.ranks) == 1 else None
        return Line(line.source, line.number, self.text, rank, line.time)

    def to_json(self) -> dict[str, Any]:
        """The fact as `kb diagnose --json` prints it."""
        lines = [{"source": line.source, "line": line.number} for line in self.lines]
        return {"kind": self.kind, "text": self.text, "ranks": self.ranks, "lines": lines}
