"""`make decision`: fit the weights of `kb.search.decision`, and measure them on questions they were not fitted to.

Positives are questions whose entry comes first. Negatives are threads that no entry covers, and every covered question
again with its entries removed, as if nobody had written them. `ARGS="--cases FILE"` adds threads in the form of
`threads.jsonl`. The printed weights are copied into the module by hand.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kb.content.causes import edges
from kb.content.parser import read_entry
from kb.content.roots import builtin_root
from kb.search import decision
from kb.search.cues import cues, out_of_scope
from kb.search.decision import Observations
from kb.search.entry_record import EntryRecord
from kb.search.fingerprints import recipe
from kb.search.index import Index
from kb.search.index_writer import write_segment
from kb.search.ranking import observations
from kb.search.segment import Segment
from kb.search.synonyms import synonyms

HERE = Path(__file__).parent
FOLDS = 10
RIDGE = 0.3
WEIGHTS = {"thread": 1.0, "question": 0.3, "without": 0.1}  # there are few real threads, and derived cases are too easy
LIMITS = (0.3, 0.4, 0.5, decision.LIKELY, 0.6, 0.7)


@dataclass(frozen=True)
class Case:
    """A question and kb's first hit. `source` is a key of `WEIGHTS`; `held` cases are never used to fit."""

    id: str
    source: str
    held: bool
    covered: bool
    right: bool
    observed: Observations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, nargs="*", default=[], help="more threads")
    args = parser.parse_args()
    cases = list(observed(args.cases))
    fitted = [case for case in cases if not case.held]
    guessed = cross_validated(fitted)
    print_weights(fit(fitted))
    shipped = {key(case): case.observed.probability for case in cases}
    print_rates("as shipped, threads", [case for case in fitted if case.source == "thread"], shipped)
    print_rates("as shipped, held threads", [case for case in cases if case.held], shipped)
    print_rates("cross-validated, threads", [case for case in fitted if case.source == "thread"], guessed)
    print_rates("cross-validated, questions and the same without their entry", fitted, guessed)
    held = [case for case in cases if case.held]
    print_rates(
        "held threads", held, dict(zip((key(case) for case in held), probabilities(fit(fitted), held), strict=True))
    )
    print_reliability(fitted, shipped)


def observed(more: Sequence[Path]) -> Iterator[Case]:
    """All cases, and the covered ones again without their entries."""
    rows = [*_rows(HERE / "questions.jsonl", "question"), *_rows(HERE / "threads.jsonl", "thread")]
    rows += [row for path in more for row in _rows(path, "thread")]
    with tempfile.TemporaryDirectory(prefix="kb-decision-") as folder:
        indexes = Indexes(Path(folder))
        for row in rows:
            text, labels = row.get("query") or row["q"], frozenset(row["labels"] + row.get("also_ok", []))
            is_held = row["source"] == "thread" and row.get("split") == "held"
            yield from _case(row, text, labels, indexes.without(frozenset()), row["source"], is_held)
            if labels and not is_held:
                yield from _case(row, text, frozenset(), indexes.without(labels), "without", is_held)


def _rows(path: Path, source: str) -> list[dict[str, Any]]:
    return [{**json.loads(line), "source": source} for line in path.read_text(encoding="utf-8").splitlines()]


def _case(
    row: dict[str, Any], text: str, labels: frozenset[str], index: Index, source: str, held: bool
) -> Iterator[Case]:
    seen = observations(index, text)
    if seen:
        yield Case(row["id"], source, held, bool(labels), seen[0] in labels, seen[1])


class Indexes:
    """Indexes of the built-in entries without some entries, which are marked as dead in the single segment."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        files = [(path, path.stem) for path in builtin_root().entry_files()]
        ids = frozenset(name for _, name in files)
        write_segment(folder, [(path, "built-in") for path, _ in files], ids)
        records = [EntryRecord.of(read_entry(path, "built-in")) for path, _ in files]
        causes, masks = edges(record.links for record in records)
        self._tables = {
            "causes": causes,
            "masks": masks,
            "cues": cues().items(),
            "out_of_scope": out_of_scope(),
            "synonyms": synonyms().items(),
            "problems": [],
        }
        self._numbers = {name: number for number, (_, name) in enumerate(files)}
        self._opened: dict[frozenset[str], Index] = {}

    def without(self, ids: frozenset[str]) -> Index:
        if ids not in self._opened:
            dead = frozenset(self._numbers[name] for name in ids)
            self._opened[ids] = Index([Segment.open(self._folder, recipe(), dead=dead)], self._tables)
        return self._opened[ids]


def features(cases: Sequence[Case]) -> np.ndarray:
    return np.array([[1.0, *case.observed] for case in cases])


def fit(cases: Sequence[Case]) -> np.ndarray:
    """Ridge logistic regression by Newton's method (Hastie, Tibshirani, Friedman 2009, 4.4.1), on centred columns."""
    columns, right = features(cases), np.array([case.right for case in cases], float)
    weight = np.array([WEIGHTS[case.source] for case in cases])
    scale = columns.std(axis=0)
    scale[0] = 1.0
    scaled = columns / scale
    ridge = RIDGE * np.diag([0.0, *[1.0] * (columns.shape[1] - 1)])
    found = np.zeros(columns.shape[1])
    for _ in range(50):
        guess = 1 / (1 + np.exp(-scaled @ found))
        slope = scaled.T @ (weight * (guess - right)) + ridge @ found
        curve = (scaled * (weight * guess * (1 - guess))[:, None]).T @ scaled + ridge
        found = found - np.linalg.solve(curve, slope)
    return np.asarray(found / scale)


def probabilities(weights: np.ndarray, cases: Sequence[Case]) -> list[float]:
    return list(1 / (1 + np.exp(-features(cases) @ weights)))


def cross_validated(cases: Sequence[Case]) -> dict[tuple[str, str], float]:
    """The probability of each case by weights fitted to the other folds. A question and its twin share a fold."""
    ids = sorted({case.id for case in cases})
    random.Random(0).shuffle(ids)
    fold = {name: number % FOLDS for number, name in enumerate(ids)}
    guessed: dict[tuple[str, str], float] = {}
    for number in range(FOLDS):
        weights = fit([case for case in cases if fold[case.id] != number])
        rest = [case for case in cases if fold[case.id] == number]
        guessed.update(zip(map(key, rest), probabilities(weights, rest), strict=True))
    return guessed


def key(case: Case) -> tuple[str, str]:
    return case.id, case.source


def print_weights(weights: np.ndarray) -> None:
    shipped = (decision.BIAS, decision.LEAD, decision.WORDING, decision.AGREEMENT)
    print("| weight | fitted | shipped |\n|---|---|---|")
    for name, value, now in zip(("BIAS", "LEAD", "WORDING", "AGREEMENT"), weights, shipped, strict=True):
        print(f"| `{name}` | {value:.2f} | {now:g} |")
    print()


def print_rates(title: str, cases: Sequence[Case], guessed: dict[tuple[str, str], float]) -> None:
    """Print right answers kept against wrong answers offered, by limit, with the standard errors of both shares."""
    covered = [case for case in cases if case.covered]
    foreign = [case for case in cases if not case.covered]
    print(
        f"{title}: {len(covered)} covered, right first {_share([case.right for case in covered])}, {len(foreign)} not"
    )
    print(
        "| offered from | not covered, offered | covered, right and offered | disowned | covered, wrong and offered |"
    )
    print("|---|---|---|---|---|")
    for limit in LIMITS:
        offered = {key(case): guessed[key(case)] >= limit for case in cases}
        print(
            f"| {limit} | {_share([offered[key(case)] for case in foreign])} "
            f"| {_share([offered[key(case)] and case.right for case in covered])} "
            f"| {_share([case.right and not offered[key(case)] for case in covered])} "
            f"| {_share([offered[key(case)] and not case.right for case in covered])} |"
        )
    print()


def print_reliability(cases: Sequence[Case], guessed: dict[tuple[str, str], float]) -> None:
    """Print how often the first entry is right, by its predicted probability."""
    print("| probability | threads and questions | right |\n|---|---|---|")
    for low in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9):
        some = [case for case in cases if case.source != "without" and low <= guessed[key(case)] < low + 0.1]
        print(f"| {low:.1f} to {low + 0.1:.1f} | {len(some)} | {_share([case.right for case in some])} |")


def _share(flags: Sequence[bool]) -> str:
    if not flags:
        return "-"
    share = sum(flags) / len(flags)
    return f"{share:.2f} ± {(share * (1 - share) / len(flags)) ** 0.5:.2f}"


if __name__ == "__main__":
    main()
