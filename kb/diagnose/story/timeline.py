"""All lines of a job as one timeline per rank, for each attempt of the job."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from kb.diagnose.evidence import SINCE_EPOCH
from kb.diagnose.story.endings import AGENT, TERMINATION, Ending, Endings, is_restart
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import TEARDOWN, TRAIN, Progress, read_progress
from kb.diagnose.story.tracebacks import Traceback, read_tracebacks

STEP_LABELS = ("step", "iteration", "global_step", "global step", "train_step", "it", "iter", "bar")
DRAWING = re.compile(r"[\^~│╰╭\s]*$|Traceback")
WORD = re.compile(r"\w{3}")
CODE_STARTS = ("  ", "\t", "│", "|", "╭", "╰")
SHORTEST = 5  # lines of an attempt: a launcher may say twice that it starts again
LAST_PROGRESS = 3  # lines of progress of a rank in which it may say that the job ended
RESUMED = 5  # lines with a counter behind the failure that an agent reports: it started the ranks again
SURVIVED = 2  # counts that a rank must advance behind a traceback: a progress bar is painted once more at the end


@dataclass(slots=True)
class RankTimeline:
    """`rank` is None for lines that name no rank: of one process that logs for all, or of several.

    `gave_up` is a line of its watchdog. `remark` is the last line that is neither progress nor part of a traceback.
    """

    rank: int | None
    progress: list[Progress] = field(default_factory=list)
    tracebacks: list[Traceback] = field(default_factory=list)
    gave_up: StoryLine | None = None
    remark: StoryLine | None = None

    @property
    def failure(self) -> Traceback | None:
        """The traceback that ended the rank; the first of its chain."""
        survived = self._survived_until()
        fatal = [item for item in self.tracebacks if not item.is_interrupted and not self._has_survived(item, survived)]
        return next(
            (traceback for traceback in reversed(fatal) if not traceback.is_chained), fatal[0] if fatal else None
        )

    @property
    def interrupted(self) -> Traceback | None:
        """Where the rank was when the launcher ended it, if a handler of its own raised then."""
        return next((traceback for traceback in self.tracebacks if traceback.is_interrupted), None)

    @property
    def counted(self) -> list[Progress]:
        return [progress for progress in self.progress if progress.count is not None]

    @property
    def step(self) -> int | None:
        """The last step of training that it printed."""
        steps = (
            progress.count
            for progress in reversed(self.progress)
            if progress.count is not None and progress.phase in (TRAIN, "") and progress.label in STEP_LABELS
        )
        return next(steps, None)

    def _survived_until(self) -> dict[str, int]:
        """For each log, the last line behind which the rank made progress, or came to its end."""
        lines: dict[str, int] = {}
        counts: dict[str, set[int]] = defaultdict(set)
        for item in reversed(self.progress):
            source = item.line.source
            if item.count is not None:
                counts[source].add(item.count)
            if source not in lines and (item.phase == TEARDOWN or len(counts[source]) >= SURVIVED):
                lines[source] = item.line.order
        return lines

    def _has_survived(self, traceback: Traceback, until: Mapping[str, int]) -> bool:
        end = traceback.last
        has_waited_since = self.gave_up is not None and self.gave_up.order > end.order and not traceback.has_waited
        return end.order < until.get(end.source, 0) or has_waited_since


@dataclass(frozen=True, eq=False)
class Attempt:
    """One start of the job; a launcher may start it again."""

    timelines: dict[int | None, RankTimeline]
    endings: Endings
    lines: Sequence[StoryLine]

    @cached_property
    def ranks(self) -> list[int]:
        """All ranks that a line or the launcher names, and those between them if they are few."""
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
        """Whether a rank failed, by its traceback, its exit code or a C++ exception."""
        codes = {ending.code for ending in self.endings.by_rank.values()}
        return bool(self.failures or self.anonymous_failures or self.endings.has_aborted_waiting or codes - {0})

    @cached_property
    def is_ordered(self) -> bool:
        """Whether lines of different ranks can be ordered: they are in one log, or have a clock."""
        if len({line.source for line in self.lines}) <= 1:
            return True
        return all(
            progress.line.time is not None and progress.line.time >= SINCE_EPOCH
            for timeline in self.timelines.values()
            for progress in timeline.counted
        ) and any(timeline.counted for timeline in self.timelines.values())

    def moment(self, line: StoryLine) -> float:
        """Orders the lines of an attempt that `is_ordered`: seconds, or the number of the line in the one log."""
        return line.time if self._has_clock and line.time is not None else line.order

    @cached_property
    def _has_clock(self) -> bool:
        return len({line.source for line in self.lines}) > 1

    @property
    def completion(self) -> StoryLine | None:
        """The last line that says that the job came to its end; None without one."""
        progress = [item for timeline in self.timelines.values() for item in timeline.progress[-LAST_PROGRESS:]]
        complete = (item for item in progress if item.phase == TEARDOWN or item.count == item.total is not None)
        return max((item.line for item in complete), key=lambda line: line.order, default=None)

    def was_alive(self, rank: int) -> bool:
        """Whether the launcher had to end it."""
        ending = self.endings.by_rank.get(rank)
        return ending is not None and ending.code == TERMINATION

    def ending(self, rank: int | None) -> Ending | None:
        return None if rank is None else self.endings.by_rank.get(rank)


def read_attempts(lines: Iterable[StoryLine]) -> list[Attempt]:
    """In the order of the log; a job that was started once, or prints no restart, has one."""
    parts: list[list[StoryLine]] = [[]]
    failed: dict[str, int] = {}  # attempt in which an agent reported failures, by its process
    for line in lines:
        agent = AGENT.search(line.text) if "failed (exitcode" in line.text else None
        if agent and failed.get(agent[1]) == len(parts):  # a second time: the ranks were started in between
            cut = next(index for index, other in enumerate(parts[-1]) if AGENT.search(other.text)) + 1
            parts[-1:] = [parts[-1][:cut], parts[-1][cut:]]
        if agent:
            failed[agent[1]] = len(parts)
        parts[-1].append(line)
        if len(parts[-1]) > SHORTEST and is_restart(line.text):
            parts.append([])
    halves = (half for part in parts for half in _cut_at_restart(part))
    return [_attempt(part) for part in halves if len(part) >= SHORTEST or part is parts[0]]


def _cut_at_restart(lines: list[StoryLine]) -> list[list[StoryLine]]:
    """In two where the counters of the job fall back behind the failure that an agent reports."""
    failures = [index for index, line in enumerate(lines) if "failed (exitcode" in line.text]
    if not failures:
        return [lines]
    cut = failures[-1] + 1
    before, after = (_counts(half) for half in (lines[:cut], lines[cut:]))
    has_restarted = len(after) >= RESUMED and before and after[0] <= max(before)
    return [lines[:cut], lines[cut:]] if has_restarted else [lines]


def _counts(lines: Sequence[StoryLine]) -> list[int]:
    progress = filter(None, map(read_progress, lines))
    return [item.count for item in progress if item.count is not None]


def _attempt(lines: Sequence[StoryLine]) -> Attempt:
    timelines: dict[int | None, RankTimeline] = {}
    endings = Endings()
    in_traceback: set[tuple[str, int | None]] = set()
    for line in lines:
        endings.read(line)
        timeline = timelines.setdefault(line.rank, RankTimeline(line.rank))
        if not _is_traceback(line, in_traceback):
            _read(line, timeline)
    endings.close()
    for rank, line in endings.gave_up.items():
        if rank is not None:
            timelines[rank].gave_up = line
    for traceback in read_tracebacks(lines):
        if not traceback.is_launcher:
            timelines.setdefault(traceback.rank, RankTimeline(traceback.rank)).tracebacks.append(traceback)
    return Attempt(timelines, endings, lines)


def _is_traceback(line: StoryLine, open_: set[tuple[str, int | None]]) -> bool:
    """Whether the line is part of a traceback; `open_` has the logs and ranks whose traceback has not ended."""
    key = line.source, line.rank
    if "Traceback (most recent" in line.text:
        open_.add(key)
        return True
    if key not in open_:
        return False
    if not line.text.startswith(CODE_STARTS):
        open_.discard(key)  # with the exception
    return True


def _read(line: StoryLine, timeline: RankTimeline) -> None:
    progress = read_progress(line)
    if progress and "rror" not in line.text[:60]:
        timeline.progress.append(progress)
    elif WORD.search(line.message) and not DRAWING.match(line.text):
        timeline.remark = line
