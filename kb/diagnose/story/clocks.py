"""Finds the skew between the clocks of logs, since lines of nodes whose clocks differ would be in the wrong order.

Ranks that train together pass a step at about the same moment, whatever their clocks say. If logs of different ranks
show the same steps and their time differences agree, the median of the differences is the skew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from kb.diagnose.evidence import SINCE_EPOCH
from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import TRAIN, Progress, read_progress

LEAST_STEPS = 3  # steps that two logs must have in common
LEAST_SKEW_S = 5.0  # a smaller skew may just be a rank that prints later
SPREAD_S, SPREAD = 2.0, 0.05  # how much the differences may vary: seconds, and a fraction of the skew
STEPS = ("step", "iteration", "global_step", "global step", "train_step", "it", "iter")


@dataclass(slots=True)
class _Log:
    """The first time of each step, and the ranks that print steps."""

    steps: dict[int, float] = field(default_factory=dict)
    ranks: set[int | None] = field(default_factory=set)


def skews(lines: Sequence[StoryLine]) -> dict[str, float]:
    """How many seconds the clock of each log is ahead of the first log with steps, for the logs that differ."""
    if len({line.source for line in lines}) < 2:
        return {}
    (_, reference), *others = _logs(lines).items() or [("", _Log())]
    known = ((source, _skew(log, reference)) for source, log in others)
    return {source: skew for source, skew in known if skew is not None}


def on_one_clock(lines: Sequence[StoryLine], ahead: Mapping[str, float]) -> Sequence[StoryLine]:
    """The lines with the skews of their logs subtracted from their times."""
    if not ahead:
        return lines
    return [
        line if line.time is None or line.source not in ahead else line._replace(time=line.time - ahead[line.source])
        for line in lines
    ]


def skew_facts(lines: Iterable[StoryLine], ahead: Mapping[str, float]) -> Iterator[Fact]:
    """A fact for each log whose clock differs, citing its first line with a time."""
    first: dict[str, StoryLine] = {}
    for line in lines:
        if line.source in ahead and line.time is not None:
            first.setdefault(line.source, line)
    for source, line in first.items():
        seconds = ahead[source]
        text = f"the clock of {source} is {abs(seconds):.0f} s {'ahead' if seconds > 0 else 'behind'}, by its steps"
        yield Fact.of(FactKind.SKEW, f"{text}; times are compared without the difference", (), line.evidence)


def _logs(lines: Iterable[StoryLine]) -> dict[str, _Log]:
    logs: dict[str, _Log] = {}
    for line in lines:
        if line.time is None or line.time < SINCE_EPOCH:
            continue
        progress = read_progress(line)
        if progress and progress.count is not None and _is_step(progress):
            log = logs.setdefault(line.source, _Log())
            log.steps.setdefault(progress.count, line.time)
            log.ranks.add(line.rank)
    return logs


def _is_step(progress: Progress) -> bool:
    return progress.phase in (TRAIN, "") and progress.label in STEPS


def _skew(log: _Log, reference: _Log) -> float | None:
    """The skew of two logs; None if they may be from one rank, which then ran the same steps twice."""
    if None in log.ranks | reference.ranks or log.ranks & reference.ranks:
        return None
    differences = [log.steps[step] - reference.steps[step] for step in log.steps.keys() & reference.steps.keys()]
    if len(differences) < LEAST_STEPS:
        return None
    skew = median(differences)
    spread = median(abs(difference - skew) for difference in differences)
    agrees = spread <= max(SPREAD_S, SPREAD * abs(skew))
    return skew if agrees and abs(skew) >= LEAST_SKEW_S else None
