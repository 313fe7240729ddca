"""Finds trends of metrics: values that are not finite, zero or constant, jumps, and falling throughput."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from kb.diagnose.story.fact import Fact, FactKind
from kb.diagnose.story.progress import Progress
from kb.diagnose.story.summary import MetricSummary
from kb.diagnose.story.timeline import Attempt
from kb.harness.collective import name_ranks

LEAST_POINTS = 5
MOST_TRENDS = 12
LEAST_ZEROS = 3
FADED = 0.05
LEAST_EQUAL = 10  # reports with the same loss
WINDOW = 20  # reports before a jump
JUMP, ABOVE_MAXIMUM, LEAST_JUMP = 5.0, 3.0, 1.0  # multiples of the window's median and maximum; lowest loss
POLICY = ("reward", "kl")  # metrics of reinforcement learning, whose loss may be 0 while it learns
ROUND = 4  # decimals to which losses are compared
LEAST_RATES = 20  # reports of throughput
FALLEN = 0.6  # share of the throughput before, below which it has fallen
STAYED = 0.9  # share of the throughput before, which at most one in ten later reports reaches
MOST_CUTS = 60  # positions in a series that are tried as the change
RATES = ("samples_s", "samples_sec", "tokens_s", "tokens_sec", "tok_s", "it_s", "it_sec", "examples_s", "throughput")


@dataclass(frozen=True, slots=True)
class Point:
    """A value of a metric, and the line that reports it."""

    value: float
    progress: Progress

    @property
    def step(self) -> str:
        if self.progress.count is not None:
            return f"{self.progress.label or 'step'} {self.progress.count}"
        return f"epoch {self.progress.epoch}" if self.progress.epoch else f"line {self.progress.line.number}"


Series = Sequence[Point]
Trend = tuple[FactKind, str, Point]  # kind, text without the ranks, and where the trend begins


def trends(attempt: Attempt) -> Iterator[Fact]:
    """Facts about trends, one for all ranks with the same trend."""
    merged: dict[tuple[FactKind, str], list[tuple[int | None, Point]]] = defaultdict(list)
    for (metric, rank), points in _series(attempt).items():
        for kind, text, point in _trends(metric, points):
            merged[kind, text].append((rank, point))
    printing = {rank for rank, timeline in attempt.timelines.items() if any(item.metrics for item in timeline.progress)}
    for (kind, text), cases in list(merged.items())[:MOST_TRENDS]:
        ranks = tuple(sorted({rank for rank, _ in cases if rank is not None}))
        subject = f"{name_ranks(ranks)}: " if ranks else ""
        odd = ranks if set(ranks) < printing else ()
        yield Fact.of(kind, f"{subject}{text}", odd, cases[0][1].progress.line.evidence)


def summarize_metrics(attempt: Attempt) -> tuple[MetricSummary, ...]:
    """A summary of each metric of each rank, in the order of their first lines."""
    return tuple(_summary(metric, rank, points) for (metric, rank), points in _series(attempt).items())


def _summary(metric: str, rank: int | None, points: Series) -> MetricSummary:
    values = [point.value for point in points if math.isfinite(point.value)]
    bad = [point for point in points if not math.isfinite(point.value)]
    first, last, lowest, highest = (values[0], values[-1], min(values), max(values)) if values else (None,) * 4
    at = bad[0].step if bad else ""
    return MetricSummary(metric, rank, len(points), first, last, lowest, highest, len(bad), at)


def _series(attempt: Attempt) -> dict[tuple[str, int | None], list[Point]]:
    series: dict[tuple[str, int | None], list[Point]] = defaultdict(list)
    for rank, timeline in attempt.timelines.items():
        for progress in timeline.progress:
            for metric, value in progress.metrics:
                series[metric, rank].append(Point(value, progress))
    return series


def _trends(metric: str, points: Series) -> Iterator[Trend]:
    if metric.endswith("loss") or "norm" in metric:
        yield from _not_finite(metric, points)
    finite = [point for point in points if math.isfinite(point.value)]
    if metric == "loss" and len(finite) >= LEAST_POINTS:
        yield from _zero_or_constant(finite)
        yield from _jump(finite)
    if metric in RATES and len(finite) >= LEAST_RATES:
        yield from _fall(metric, finite)


def _not_finite(metric: str, points: Series) -> Iterator[Trend]:
    bad = [point for point in points if not math.isfinite(point.value)]
    if not bad:
        return
    start = points.index(bad[0])
    before = next((point for point in reversed(points[:start]) if math.isfinite(point.value)), None)
    last = f", last finite value {before.value:g}" if before else ", from the first report on"
    name = "nan" if math.isnan(bad[0].value) else "inf"
    if all(not math.isfinite(point.value) for point in points[start:]):
        yield FactKind.NOT_FINITE, f"{metric} is {name} from {bad[0].step} to the end{last}", bad[0]
    else:
        text = f"{metric} is {name} in {len(bad)} of {len(points)} reports, finite again later"
        yield FactKind.RECOVERED, text, bad[0]


def _zero_or_constant(points: Series) -> Iterator[Trend]:
    values = [point.value for point in points]
    zeros = next((index for index, value in enumerate(values) if value == 0.0), len(values))
    is_policy = any(name in POLICY for point in points for name, _ in point.progress.metrics)
    has_faded = zeros > 0 and values[zeros - 1] < FADED  # a model that memorizes its data
    if len(values) - zeros >= LEAST_ZEROS and not any(values[zeros:]) and not is_policy and not has_faded:
        yield FactKind.ZERO, f"loss is exactly 0 from {points[zeros].step} to the end", points[zeros]
    elif (
        len(values) >= LEAST_EQUAL
        and len({round(value, ROUND) for value in values[-LEAST_EQUAL:]}) == 1
        and _is_precise(values[-1])
    ):
        equal = next(
            (index for index, value in enumerate(reversed(values)) if round(value, ROUND) != round(values[-1], ROUND)),
            len(values),
        )
        yield FactKind.CONSTANT, f"loss is {values[-1]:g} in the last {equal} reports", points[-1]


def _is_precise(value: float) -> bool:
    """Whether a value has more than two decimals; with fewer, reports of a falling loss may be equal too."""
    return round(value, 2) != value


def _jump(points: Series) -> Iterator[Trend]:
    for index in range(LEAST_POINTS, len(points)):
        window = [point.value for point in points[max(0, index - WINDOW) : index]]
        value, usual = points[index].value, median(window)
        if usual > 0 and value > JUMP * usual and value > ABOVE_MAXIMUM * max(window) and value > LEAST_JUMP:
            times = f"{value / usual:.0f} times the median before"
            yield FactKind.JUMP, f"loss jumps to {value:.3g} at {points[index].step}, {times}", points[index]
            return


def _fall(metric: str, points: Series) -> Iterator[Trend]:
    """The trend if the throughput fell and stayed low."""
    values = [point.value for point in points if point.value > 0]
    if len(values) < len(points):
        return
    cut = _change([math.log(value) for value in values])
    usual = median(values[:cut])
    share = median(values[cut:]) / usual
    if share < FALLEN and max(_highest(values[cut:]), values[-1]) < usual * STAYED:
        yield FactKind.SLOWER, f"{metric} falls to {share:.0%} at {points[cut].step} and stays there", points[cut]


def _change(values: Sequence[float]) -> int:
    """The position that divides a series into two parts with the least variation, each about its median."""
    first, last = len(values) // 6, len(values) - len(values) // 6
    return min(range(first, last, max(1, len(values) // MOST_CUTS)), key=lambda cut: _spread(values, cut))


def _spread(values: Sequence[float], cut: int) -> float:
    halves = (values[:cut], values[cut:])
    return sum(sum(abs(value - middle) for value in half) for half in halves for middle in (median(half),))


def _highest(values: Sequence[float]) -> float:
    """The highest value without the top tenth, since a report may be late and the next one early."""
    return sorted(values)[-1 - len(values) // 10]
