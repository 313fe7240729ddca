"""How well each engine tells an answer from a neighbour: by one limit on the score of its first hit.

The limit is the lowest that offers at most `BAR` of the uncovered threads of `split: dev`; the figures are those of
`split: held`, to which nothing was fitted. kb is measured twice: with such a limit, and with the one that it ships.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kb.search.decision import LIKELY

THREADS = Path(__file__).with_name("threads.jsonl")
BAR = 0.15  # of the uncovered threads may be offered an entry
Offer = tuple[str, float]  # the first hit and its score


@dataclass(frozen=True)
class Thread:
    """A question, the entries that answer it (none where kb has no such entry), and whether limits may be set by it."""

    question: str
    labels: frozenset[str]
    is_held: bool


@dataclass(frozen=True)
class Rates:
    """Shares of the threads. The first is of those that no entry covers, the others are of those that one does."""

    false: float
    right: float
    disowned: float


def threads() -> list[Thread]:
    rows = map(json.loads, THREADS.read_text(encoding="utf-8").splitlines())
    return [Thread(row["query"], frozenset(row["labels"]), row["split"] == "held") for row in rows]


def table(offers: Mapping[str, Sequence[Offer]]) -> Iterator[str]:
    """By engine, one offer for each of `threads()`."""
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
    """Of the scores, the lowest that as a limit keeps false answers to the bar; above all of them where none does."""
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
