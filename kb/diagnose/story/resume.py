"""Finds runs whose step continues from a checkpoint while the loss does not: their weights are not the checkpoint's."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.progress import RESUME, Progress
from kb.diagnose.story.timeline import Attempt

WINDOW = 5  # reports of the loss that are needed before the resume
ABOVE, LEAST_RISE = 2.0, 0.5  # rise of the loss: a multiple of the loss before, and an absolute value
AS_AT_START = 0.25  # relative difference within which the loss is as high as in the first report


@dataclass(frozen=True, slots=True)
class _Report:
    """A loss at a step. `is_resumed`: since the last report, the rank resumed or was started again."""

    step: int
    loss: float
    is_resumed: bool
    progress: Progress


def losses_after_resume(attempts: Sequence[Attempt]) -> Iterator[Fact]:
    """A fact about each rank's first resume after which the loss is far above what it was before that step."""
    for rank, reports in _reports(attempts).items():
        for index, report in enumerate(reports):
            before = _before(reports, index) if report.is_resumed else []
            if len(before) < WINDOW:
                continue
            usual, start = median(before), reports[0].loss
            if report.loss > max(ABOVE * usual, usual + LEAST_RISE):
                yield _fact(rank, report, usual, start)
                return


def _before(reports: Sequence[_Report], index: int) -> list[float]:
    """The losses of the last `WINDOW` reports before this one at earlier steps, or fewer if there are fewer."""
    earlier = (reports[number] for number in reversed(range(index)) if reports[number].step < reports[index].step)
    return [report.loss for report in islice(earlier, WINDOW)]


def _fact(rank: int | None, report: _Report, usual: float, start: float) -> Fact:
    text = f"loss is {report.loss:.3g} at step {report.step}, behind a resume, and was {usual:.3g} before it"
    if abs(report.loss - start) <= AS_AT_START * start:
        text = f"{text}: as high as at the start of the run"
    return Fact.of(FactKind.RESUMED_ABOVE, text, () if rank is None else (rank,), report.progress.line.evidence)


def _reports(attempts: Sequence[Attempt]) -> dict[int | None, list[_Report]]:
    reports: dict[int | None, list[_Report]] = defaultdict(list)
    for number, attempt in enumerate(attempts):
        for rank, timeline in attempt.timelines.items():
            is_resumed = number > 0
            for progress in timeline.progress:
                is_resumed = is_resumed or progress.phase == RESUME
                loss = dict(progress.metrics).get("loss")
                if loss is not None and progress.count is not None and math.isfinite(loss):
                    reports[rank].append(_Report(progress.count, loss, is_resumed, progress))
                    is_resumed = False
    return reports
