"""The timelines of an attempt as rows: spans of phases, and a mark where the rank gave up, raised or was killed."""

from __future__ import annotations

from kb.diagnose.evidence import SINCE_EPOCH
from kb.diagnose.story.endings import ABORT, FATAL
from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import Progress
from kb.diagnose.story.summary import DIED, FAILED, WAITED, AttemptSummary, RankRow, Span
from kb.diagnose.story.timeline import Attempt, RankTimeline
from kb.diagnose.story.trends import summarize_metrics

MOST_ROWS = 64
DIGITS = 4  # decimals of a fraction
MOST_SPANS = 24
MOST_METRICS = 64
SHORT_GAP = 0.1  # share of the attempt; a shorter gap belongs to the phase before it, a longer one is silence
LONGEST_ERROR = 200  # characters


def summarize(attempt: Attempt) -> AttemptSummary:
    """A summary with rows for the first `MOST_ROWS` ranks that printed progress or failed, or whose ending is known."""
    scale = _Scale(attempt)
    ranks = sorted({*attempt.timelines, *attempt.endings.by_rank}, key=lambda rank: (rank is None, rank or 0))
    rows = (_row(attempt, attempt.timelines.get(rank, RankTimeline(rank)), scale) for rank in ranks)
    shown = [row for row in rows if row.spans or row.mark or row.ending][:MOST_ROWS]
    return AttemptSummary(tuple(shown), summarize_metrics(attempt)[:MOST_METRICS], scale.seconds, len(attempt.lines))


class _Scale:
    """Converts lines to fractions of an attempt: by time if all progress has one, else by the order of lines."""

    def __init__(self, attempt: Attempt) -> None:
        lines = [progress.line for timeline in attempt.timelines.values() for progress in timeline.progress]
        lines += [failure.first for timeline in attempt.timelines.values() for failure in timeline.tracebacks]
        times = [line.time for line in lines if line.time is not None]
        is_complete = len(times) == len(lines) > 0
        self.has_clock = is_complete and min(times) > SINCE_EPOCH and max(times) > min(times)
        values = times if self.has_clock else [line.order for line in attempt.lines] or [0]
        self._first, self._extent = min(values), max(max(values) - min(values), 1e-9)

    @property
    def seconds(self) -> float | None:
        return self._extent if self.has_clock else None

    def fraction(self, line: StoryLine) -> float:
        value = line.time if self.has_clock else line.order
        return 1.0 if value is None else round(min(1.0, max(0.0, (value - self._first) / self._extent)), DIGITS)


def _row(attempt: Attempt, timeline: RankTimeline, scale: _Scale) -> RankRow:
    failure, ending = timeline.failure, attempt.ending(timeline.rank)
    spans = _spans(timeline.progress, scale)
    counted = timeline.counted
    last = ending.text if ending else counted[-1].text if counted else ""
    if failure:
        mark, at = WAITED if failure.has_waited else FAILED, scale.fraction(failure.last)
        return RankRow(timeline.rank, spans, mark, at, failure.place, failure.error[:LONGEST_ERROR], last)
    mark = "" if ending is None else DIED if ending.code in (*FATAL, ABORT) else FAILED if ending.code > 0 else ""
    return RankRow(timeline.rank, spans, mark, 1.0, "", "", last)


def _spans(progress: list[Progress], scale: _Scale) -> tuple[Span, ...]:
    spans: list[tuple[str, float, float, Progress]] = []
    for item in progress:
        at, phase = scale.fraction(item.line), item.phase or (spans[-1][0] if spans else "")
        if spans and spans[-1][0] == phase and at - spans[-1][2] <= SHORT_GAP:
            spans[-1] = phase, spans[-1][1], at, item if item.count is not None else spans[-1][3]
        elif len(spans) < MOST_SPANS:
            spans.append((phase, at, at, item))
    return tuple(Span(phase, start, end, last.text) for phase, start, end, last in spans)
