"""The story of a job, as answers show it: facts, and for each attempt a row per rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kb.diagnose.evidence import Line
from kb.diagnose.story.fact import ABSENT, TRENDS, Fact

WAITED, FAILED, DIED = "T", "X", "K"  # marks of a row: gave up waiting, failed by itself, was killed


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of one phase. `start` and `end` are fractions of the attempt; `last` is its last counter, or empty."""

    phase: str
    start: float
    end: float
    last: str


@dataclass(frozen=True, slots=True)
class RankRow:
    """What a rank did. `mark` is `WAITED`, `FAILED`, `DIED` or empty, at the fraction `marked_at`.

    `rank` is None for lines that name no rank; `ending` is the exit code or signal, or the last progress.
    """

    rank: int | None
    spans: tuple[Span, ...]
    mark: str
    marked_at: float
    place: str
    error: str
    ending: str


@dataclass(frozen=True, slots=True)
class MetricSummary:
    """A series of a metric, as `rank` printed it (None: lines that name no rank). Values are finite, or None.

    `not_finite` counts nan and inf; `not_finite_at` is the first of them, such as `step 11`, or empty.
    """

    name: str
    rank: int | None
    count: int
    first: float | None
    last: float | None
    lowest: float | None
    highest: float | None
    not_finite: int
    not_finite_at: str


@dataclass(frozen=True, slots=True)
class AttemptSummary:
    """`seconds` is how long the attempt lasted by the clock of its lines; None where they have none."""

    rows: tuple[RankRow, ...]
    metrics: tuple[MetricSummary, ...]
    seconds: float | None
    lines: int


@dataclass(frozen=True, slots=True)
class Story:
    """`facts` are about the first attempt, whose end is the cause of the later ones.

    `culprit` is the one that says which rank failed by itself, `waiting` are the ranks whose traceback says that they
    waited for others, or lost them. A job whose last attempt went well has no facts but those on metrics;
    `completion` is its line that says that it came to its end. `survived` has for each log the number of a line: what
    was printed before it did not end the job.
    """

    attempts: tuple[AttemptSummary, ...] = ()
    facts: tuple[Fact, ...] = ()
    culprit: Fact | None = None
    waiting: frozenset[int] = frozenset()
    completion: Line | None = None
    survived: Mapping[str, int] = field(default_factory=dict)

    def has_survived(self, line: Line) -> bool:
        """Whether the job came to its end, or made progress, after it printed this line, as far as that is known."""
        return line.number < self.survived.get(line.source, 0)

    @property
    def absent(self) -> tuple[int, ...]:
        """Ranks that did not come to the call in which the others wait."""
        return tuple(sorted({rank for fact in self.facts if fact.kind in ABSENT for rank in fact.ranks}))

    @property
    def trends(self) -> tuple[Fact, ...]:
        """Of metrics, such as a throughput that falls: also of a job that goes well."""
        return tuple(fact for fact in self.facts if fact.kind in TRENDS)

    def to_json(self) -> dict[str, Any]:
        """As `kb diagnose --json` prints it."""
        return {
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "facts": [fact.to_json() for fact in self.facts],
        }
