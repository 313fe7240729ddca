"""The story of a job as answers show it: facts, and a row per rank for each attempt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from kb.diagnose.evidence import Line
from kb.diagnose.story.fact import ABSENT, TRENDS, Fact

WAITED, FAILED, DIED = "T", "X", "K"  # marks of a row: gave up waiting, failed by itself, was killed


@dataclass(frozen=True, slots=True)
class Span:
    """A period of one phase. `start` and `end` are fractions of the attempt; `last` is its last progress, as text."""

    phase: str
    start: float
    end: float
    last: str


@dataclass(frozen=True, slots=True)
class RankRow:
    """What a rank did. `mark` is `WAITED`, `FAILED`, `DIED` or empty, at the fraction `marked_at`.

    `rank` is None for lines that name no rank. `ending` is the exit code, the signal or the last progress.
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
    """The values of a metric that `rank` printed (None: lines that name no rank). They are finite or None.

    `not_finite` counts nan and inf; `not_finite_at` is where the first of them is, such as `step 11`, or empty.
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
    """`seconds` is how long the attempt lasted by the times of its lines; None if they have none."""

    rows: tuple[RankRow, ...]
    metrics: tuple[MetricSummary, ...]
    seconds: float | None
    lines: int


@dataclass(frozen=True, slots=True)
class Story:
    """`facts` are about the first attempt, whose end caused the later ones.

    `culprit` is the fact that says which rank failed by itself. `waiting` are the ranks whose traceback says that they
    waited for others or lost them. If the last attempt succeeded, there are only facts about metrics, and `completion`
    is the line that reports the end of the job. `survived` has a line number for each log: what was printed before that
    line did not end the job.
    """

    attempts: tuple[AttemptSummary, ...] = ()
    facts: tuple[Fact, ...] = ()
    culprit: Fact | None = None
    waiting: frozenset[int] = frozenset()
    completion: Line | None = None
    survived: Mapping[str, int] = field(default_factory=dict)

    def has_survived(self, line: Line) -> bool:
        """Whether the job is known to have made progress, or completed, after it printed this line."""
        return line.number < self.survived.get(line.source, 0)

    @property
    def absent(self) -> tuple[int, ...]:
        """The ranks that did not come to the call in which the others wait."""
        return tuple(sorted({rank for fact in self.facts if fact.kind in ABSENT for rank in fact.ranks}))

    @property
    def trends(self) -> tuple[Fact, ...]:
        """The facts about metrics, such as falling throughput, which a healthy job may have too."""
        return tuple(fact for fact in self.facts if fact.kind in TRENDS)

    def to_json(self) -> dict[str, Any]:
        """The story as `kb diagnose --json` prints it."""
        return {
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "facts": [fact.to_json() for fact in self.facts],
        }
