"""Test whether each weight of the search and each glossary group is worth having: `tuning.py --cases FILE...`

A weight is compared with its neutral value, and with the value that is best on the other folds of the questions,
where a weight that only fits its own questions loses. A glossary group is left out twice: with the entries as they
are, in both languages, and with the entries without Chinese text, as a team writes them in a hurry. Questions are
JSON lines with `query`, `lang`, `labels` and `also_ok`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kb.content.roots import builtin_root
from kb.search import document, index, query, ranking, scoring, spelling, synonyms
from kb.search.index import Index
from kb.search.index_cache import open_index

FOLDS = 5
CHINESE = re.compile(r"[\u3400-\u9fff]+")
UNRANKED = 1000

Ranks = list[int]  # rank of the right entry for each question; the first is 0


@dataclass(frozen=True)
class Question:
    """What somebody typed, and the entries that are right as a first answer."""

    text: str
    lang: str
    right: frozenset[str]


@dataclass(frozen=True)
class Weight:
    """A constant of the search. `neutral` is a value at which it has no effect, or the usual value."""

    module: ModuleType
    name: str
    neutral: float
    others: tuple[float, ...]

    @property
    def shipped(self) -> float:
        return float(getattr(self.module, self.name))


WEIGHTS = (
    Weight(document, "HEADLINE", 0.2501, (1.0, 2.0, 4.0, 6.0)),
    Weight(document, "SHOWN", 0.25, (1.0, 1.5)),
    Weight(document, "PROSE", 0.0, (0.1, 0.5, 1.0)),
    Weight(index, "K1", 1.2, (3.0, 5.0, 12.0)),
    Weight(index, "B", 0.0, (0.4, 1.0)),
    Weight(scoring, "LEAST_COVERAGE", 1.0, (0.4, 0.55, 0.85)),
    Weight(query, "SYNONYM_WEIGHT", 0.0, (0.3, 0.7, 1.0)),
    Weight(query, "WHOLE_WEIGHT", 1.0, (1.5, 3.0)),
    Weight(spelling, "CORRECTION_WEIGHT", 0.0, (0.5, 1.0)),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=Path, nargs="+", required=True)
    parser.add_argument("--split", help="only the cases whose `split` is this, or that have none")
    args = parser.parse_args()
    questions = read(args.cases, args.split)
    for lines in (of_weights(questions), of_glossary(questions)):
        for line in lines:
            print(line, flush=True)
        print()


def read(files: Sequence[Path], split: str | None) -> list[Question]:
    """The questions in these files, without duplicates."""
    cases = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    chosen = [case for case in cases if split is None or case.get("split", split) == split]
    questions = [Question(case["query"], case["lang"], frozenset(case["labels"] + case["also_ok"])) for case in chosen]
    return list({question.text: question for question in questions}.values())


def of_weights(questions: Sequence[Question]) -> Iterator[str]:
    yield f"{len(questions)} questions, recall at 1 / at 3; `elsewhere` takes the value that the other folds choose"
    yield ""
    yield "| weight | as shipped | | neutral | | elsewhere | chosen |"
    yield "|---|---|---|---|---|---|---|"
    for weight in WEIGHTS:
        values = dict.fromkeys((weight.shipped, weight.neutral, *weight.others))
        tried = {value: _with_weight(weight, value, questions) for value in values}
        elsewhere, chosen = cross_validated(tried)
        yield (
            f"| `{weight.name}` | {weight.shipped:g} | {_recalls(tried[weight.shipped])} | {weight.neutral:g} "
            f"| {_recalls(tried[weight.neutral])} | {_recalls(elsewhere)} | {', '.join(f'{one:g}' for one in chosen)} |"
        )


def cross_validated(tried: dict[float, Ranks]) -> tuple[Ranks, list[float]]:
    """Ranks of every question with the value that is best for the other folds, and those values.

    Among equally good values the first is used, which is the shipped one.
    """
    count = len(next(iter(tried.values())))
    ranks, chosen = [], []
    for fold in range(FOLDS):
        rest = [number for number in range(count) if number % FOLDS != fold]
        best = max(tried, key=lambda value: sum(_gain(tried[value][number]) for number in rest))
        chosen.append(best)
        ranks += [tried[best][number] for number in range(fold, count, FOLDS)]
    return ranks, chosen


def of_glossary(questions: Sequence[Question]) -> Iterator[str]:
    chinese = [question for question in questions if question.lang == "zh"]
    groups = synonyms.read()
    with _opened() as index, _without_chinese(), _opened() as english:
        views: tuple[tuple[Index, Sequence[Question]], ...] = ((index, questions), (english, chinese))
        base = [_ranks(*view) for view in views]
        without = [_without_group([], view) for view in views]
        yield f"Glossary: all {len(questions)} questions; the {len(chinese)} Chinese ones over entries without Chinese"
        yield ""
        yield "| left out | changed | gain | changed | gain over English entries |"
        yield "|---|---|---|---|---|"
        yield _glossary_row("the whole glossary", base, without)
        for number, group in enumerate(groups):
            rest = groups[:number] + groups[number + 1 :]
            left = [_without_group(rest, view) for view in views]
            if left != base:
                yield _glossary_row(", ".join(group[:3]), base, left)
        yield ""
        yield "Groups that are not listed change the rank of no question."


def _glossary_row(name: str, base: list[Ranks], left: list[Ranks]) -> str:
    cells = []
    for with_it, without_it in zip(base, left, strict=True):
        pairs = list(zip(with_it, without_it, strict=True))
        cells.append(f"{sum(a != b for a, b in pairs)} | {sum(_gain(b) - _gain(a) for a, b in pairs):+.2f}")
    return f"| {name} | {' | '.join(cells)} |"


def _without_group(rest: list[list[str]], view: tuple[Index, Sequence[Question]]) -> Ranks:
    with _set(view[0], "synonyms", synonyms.table(rest)):
        return _ranks(*view)


def _with_weight(weight: Weight, value: float, questions: Sequence[Question]) -> Ranks:
    with _set(weight.module, weight.name, value), _opened() as index:
        return _ranks(index, questions)


@contextmanager
def _opened() -> Iterator[Index]:
    """An index that is built again in a new cache, because no stamp records a changed weight."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        with open_index((builtin_root(),), force=True) as index:
            yield index


@contextmanager
def _set(owner: Any, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _without_chinese() -> Iterator[None]:
    """Collect documents without their Chinese text in the block."""
    whole: Callable[..., document.Document] = document.document

    def english(*args: Any) -> document.Document:
        stored, parts = whole(*args)
        return stored, [(weight, CHINESE.sub(" ", text)) for weight, text in parts]

    with _set(document, "document", english):
        yield


def _ranks(index: Index, questions: Sequence[Question]) -> Ranks:
    return [_rank(index, question) for question in questions]


def _rank(index: Index, question: Question) -> int:
    hits = ranking.search(index, question.text, 10).hits
    return next((rank for rank, hit in enumerate(hits) if hit.id in question.right), UNRANKED)


def _gain(rank: int) -> float:
    """The reciprocal rank: 1 for a right first answer, 1/2 for a right second one, and so on."""
    return 0.0 if rank == UNRANKED else 1 / (rank + 1)


def _recalls(ranks: Ranks) -> str:
    return " / ".join(f"{sum(rank < k for rank in ranks) / len(ranks):.3f}" for k in (1, 3))


if __name__ == "__main__":
    main()
