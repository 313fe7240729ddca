"""One timeline per rank for each attempt of a job."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kb.diagnose.evidence import SINCE_EPOCH
from kb.diagnose.failure_lines import is_interruption
from kb.diagnose.story.endings import TERMINATION, Ending, Endings
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import TEARDOWN, TRAIN, Progress
from kb.diagnose.story.tracebacks import Traceback

STEP_LABELS = ("step", "iteration", "global_step", "global step", "train_step", "it", "iter", "bar")
LAST_PROGRESS = 3  # last progress lines of a rank, in which it may say that the job ended
SURVIVED = 2  # counts that a rank must advance after a traceback, since a progress bar is drawn once more at the end


@dataclass(slots=True)
class RankTimeline:
    """`rank` is None for lines that name no rank, from one process that logs for all or from several.

    `gave_up` is the first line of its watchdog. `remark` is the last line that is neither progress nor traceback.
    """

    rank: int | None
    progress: list[Progress] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    gave_up: StoryLine | None = None
    remark: StoryLine | None = None

    @property
    def failure(self) -> Traceback | None:
        """The traceback that ended the rank, the first of its chain."""
        survived = self.survived_until
        fatal = [item for item in self.tracebacks if not item.is_interrupted and not self._has_survived(item, survived)]
        return next(
            (traceback for traceback in reversed(fatal) if not traceback.is_chained), fatal[0] if fatal else None
        )

    @property
    def interrupted(self) -> Traceback | None:
        """Where the rank was when the launcher ended it, if its own signal handler raised an exception."""
        return next((traceback for traceback in self.tracebacks if traceback.is_interrupted), None)

    @property
    def counted(self) -> list[Progress]:
        return [progress for progress in self.progress if progress.count is not None]

    @property
    def step(self) -> int | None:
        """The last training step that the rank printed."""
        steps = (
            progress.count
            for progress in reversed(self.progress)
            if progress.count is not None and progress.phase in (TRAIN, "") and progress.label in STEP_LABELS
        )
        return next(steps, None)

    @property
    def survived_until(self) -> dict[str, StoryLine]:
        """For each log, the last line after which the rank made progress or completed."""
        lines: dict[str, StoryLine] = {}
        counts: dict[str, set[int]] = defaultdict(set)
        for item in reversed(self.progress):
            source = item.line.source
            if item.count is not None:
                counts[source].add(item.count)
            if source not in lines and (item.phase == TEARDOWN or len(counts[source]) >= SURVIVED):
                lines[source] = item.line
        return lines

    def _has_survived(self, traceback: Traceback, survived: Mapping[str, StoryLine]) -> bool:
        end = traceback.last
        until = survived.get(end.source)
        has_waited_since = self.gave_up is not None and self.gave_up.order > end.order and not traceback.has_waited
        return (until is not None and end.order < until.order) or has_waited_since


@dataclass(frozen=True, eq=False)
class Attempt:
    """One start of the job; a launcher may start it again."""

    timelines: dict[int | None, RankTimeline]
    endings: Endings
    lines: Sequence[StoryLine]

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks that a line or the launcher names, and the ranks between them if these are few."""
        named = {rank for rank in self.timelines if rank is not None} | set(self.endings.by_rank)
        named |= set(range(self.endings.started))
        gaps = set(range(min(named), max(named))) - named if named else set()
        return sorted(named | gaps if 2 * len(gaps) <= len(named) else named)

    @cached_property
    def failures(self) -> dict[int, Traceback]:
        """The fatal traceback of each rank that printed one."""
        by_rank = ((rank, timeline.failure) for rank, timeline in self.timelines.items() if rank is not None)
        return {rank: failure for rank, failure in by_rank if failure}

    @cached_property
    def anonymous_failures(self) -> list[Traceback]:
        """Tracebacks in lines that name no rank."""
        timeline = self.timelines.get(None)
        if timeline is None or timeline.failure is None:
            return []
        return [traceback for traceback in timeline.tracebacks if not traceback.is_chained]

    @property
    def has_failed(self) -> bool:
        """Whether a rank failed, according to a traceback, an exit code or a C++ exception."""
        codes = {ending.code for ending in self.endings.by_rank.values()}
        return bool(self.failures or self.anonymous_failures or self.endings.has_aborted_waiting or codes - {0})

    @cached_property
    def is_ordered(self) -> bool:
        """Whether lines of different ranks can be ordered: they are in one log or have times."""
        if len({line.source for line in self.lines}) <= 1:
            return True
        return all(
            progress.line.time is not None and progress.line.time >= SINCE_EPOCH
            for timeline in self.timelines.values()
            for progress in timeline.counted
        ) and any(timeline.counted for timeline in self.timelines.values())

    def moment(self, line: StoryLine) -> float:
        """The sort key of a line in an attempt that `is_ordered`: seconds, or the order in the only log."""
        return line.time if self._has_clock and line.time is not None else line.order

    @cached_property
    def _has_clock(self) -> bool:
        return len({line.source for line in self.lines}) > 1

    @property
    def completion(self) -> StoryLine | None:
        """The last line that reports the end of the job; None without one, or if an unfinished count follows it."""
        progress = [item for timeline in self.timelines.values() for item in timeline.progress[-LAST_PROGRESS:]]
        begun = max((item.line.order for item in progress if _is_under_way(item)), default=0)
        complete = (item for item in progress if _is_complete(item))
        ends = (item.line for item in complete if item.line.order > begun)
        return max(ends, key=lambda line: line.order, default=None)

    @property
    def survived_until(self) -> dict[str, int]:
        """For each log, the number of the last line after which a rank made progress."""
        lines = [line for timeline in self.timelines.values() for line in timeline.survived_until.values()]
        return {line.source: line.number for line in sorted(lines, key=lambda line: line.number)}

    def was_alive(self, rank: int) -> bool:
        """Whether the launcher had to end the rank."""
        ending = self.endings.by_rank.get(rank)
        return ending is not None and ending.code == TERMINATION

    def ending(self, rank: int | None) -> Ending | None:
        return None if rank is None else self.endings.by_rank.get(rank)


def _is_complete(progress: Progress) -> bool:
    """Whether the progress reports an end; a launcher that shuts workers down because of a signal does not."""
    is_teardown = progress.phase == TEARDOWN and not is_interruption(progress.line.text)
    return is_teardown or progress.count == progress.total is not None


def _is_under_way(progress: Progress) -> bool:
    return progress.count is not None and progress.total is not None and progress.count < progress.total
