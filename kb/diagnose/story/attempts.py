"""Divides lines into attempts, where the job was started again, and assigns each line to the timeline of its rank."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise, zip_longest

from kb.diagnose.story.endings import AGENT, Endings, is_restart
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import read_progress
from kb.diagnose.story.timeline import Attempt, RankTimeline
from kb.diagnose.story.tracebacks import read_tracebacks

DRAWING = re.compile(r"[\^~│╰╭\s]*$|Traceback")
WORD = re.compile(r"\w{3}")
CODE_STARTS = ("  ", "\t", "│", "|", "╭", "╰")
FOLDER = re.compile(r"(?:^|/)attempt_(\d{1,4})(?:/|$)")  # in torchrun's --log-dir
SHORTEST = 5  # fewest lines of an attempt, since a launcher may announce a restart twice
RESUMED = 5  # lines with a counter after a failure that show that the ranks were started again


def read_attempts(lines: Iterable[StoryLine]) -> list[Attempt]:
    """The attempts in the order of the log; a job that was started once, or prints no restart, has one."""
    by_folder: dict[int, list[StoryLine]] = defaultdict(list)
    others: list[StoryLine] = []
    for line in lines:
        folder = FOLDER.search(line.source)
        (by_folder[int(folder[1])] if folder else others).append(line)
    if len(by_folder) < 2:
        return [_attempt(part) for part in _parts(sorted([*others, *by_folder[0]], key=_order))]
    ranks = [by_folder[number] for number in sorted(by_folder)]
    pairs = zip_longest(ranks, _parts(others), fillvalue=list[StoryLine]())
    return [_attempt(sorted([*own, *launcher], key=_order)) for own, launcher in pairs]


def _order(line: StoryLine) -> int:
    return line.order


def _parts(lines: Iterable[StoryLine]) -> list[list[StoryLine]]:
    """The lines of each attempt, divided where a launcher reports a restart or counters show one."""
    parts: list[list[StoryLine]] = [[]]
    failed: dict[str, int] = {}  # the attempt in which an agent reported failures, by the agent's process
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
    halves = [half for part in parts for half in _cut_at_restarts(part)]
    return [half for half in halves if len(half) >= SHORTEST or half is halves[0]]


def _cut_at_restarts(lines: list[StoryLine]) -> list[list[StoryLine]]:
    """Divide lines where the counters of the job fall back after a failure that an agent reports."""
    failures = [index + 1 for index, line in enumerate(lines) if "failed (exitcode" in line.text]
    cuts, highest = [0], -1
    for start, cut, end in zip([0, *failures], failures, [*failures[1:], len(lines)], strict=False):
        highest = max([highest, *_counts(lines[start:cut])])
        after = _counts(lines[cut:end])
        if len(after) >= RESUMED and after[0] <= highest:
            cuts.append(cut)
            highest = -1
    return [lines[start:end] for start, end in pairwise([*cuts, len(lines)])]


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
        open_.discard(key)  # this line is the exception
    return True


def _read(line: StoryLine, timeline: RankTimeline) -> None:
    progress = read_progress(line)
    if progress and "rror" not in line.text[:60]:
        timeline.progress.append(progress)
    elif WORD.search(line.message) and not DRAWING.match(line.text):
        timeline.remark = line
