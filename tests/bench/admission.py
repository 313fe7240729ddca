"""How well each engine tells an answer from a neighbour with a limit on the score of its first hit.

The limit is the lowest that offers an entry for at most `BAR` of the uncovered threads of `split: dev`. The figures
are for `split: held`, to which nothing was fitted. kb is measured with such a limit and with the limit that it ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kb.search.decision import LIKELY

THREADS = Path(__file__).with_name("threads.jsonl")
BAR = 0.15  # share of the uncovered threads that may be offered an entry
Offer = tuple[str, float]  # the first hit and its score


@dataclass(frozen=True)
class Thread:
    """A question, the entries that answer it (none if kb has no such entry), and whether it is held out of fitting."""

    question: str
    labels: frozenset[str]
    is_held: bool


@dataclass(frozen=True)
class Rates:
    """Shares of threads: the first among threads that no entry covers, the others among covered threads."""

    false: float
    right: float
    disowned: float


def threads() -> list[Thread]:
    rows = map(json.loads, THREADS.read_text(encoding="utf-8").splitlines())
    return [Thread(row["query"], frozenset(row["labels"]), row["split"] == "held") for row in rows]


def table(offers: Mapping[str, Sequence[Offer]]) -> Iterator[str]:
    """The table of rates. `offers` has for each engine one offer per thread of `threads()`."""
    cases = threads()
    held = [case for case in cases if case.is_held]
    covered = sum(bool(case.labels) for case in held)
    yield (
        f"| {len(held)} held threads, {covered} of them covered | limit | not covered, offered | covered, right and offered "
        "| disowned |"
    )
    yield "|---|---|---|---|---|"
    for name, by_thread in offers.items():
        pairs = list(zip(cases, by_thread, strict=True))
        rest = [(case, offer) for case, offer in pairs if not case.is_held]
        limits = {"fitted": lowest_limit(rest)} | ({"shipped": LIKELY} if name == "kb" else {})
        for kind, limit in limits.items():
            shares = rates([pair for pair in pairs if pair[0].is_held], limit)
            yield f"| {name} | {limit:.2f}, {kind} | {shares.false:.2f} | {shares.right:.2f} | {shares.disowned:.2f} |"


def lowest_limit(pairs: Sequence[tuple[Thread, Offer]], bar: float = BAR) -> float:
    """The lowest score that as a limit keeps false answers within the bar, or a limit above all scores."""
    scores = sorted({score for _, (_, score) in pairs})
    return next((score for score in scores if rates(pairs, score).false <= bar), scores[-1] + 1)


def rates(pairs: Sequence[tuple[Thread, Offer]], limit: float) -> Rates:
    covered = [(case, *offer) for case, offer in pairs if case.labels]
    foreign = [score for case, (_, score) in pairs if not case.labels]
    return Rates(
        _share([score >= limit for score in foreign]),
        _share([score >= limit and entry in case.labels for case, entry, score in covered]),
        _share([score < limit and entry in case.labels for case, entry, score in covered]),
    )


def _share(flags: Sequence[bool]) -> float:
    return sum(flags) / (len(flags) or 1)
