"""How often the first answer to a log is right, beside full-text search over the same entries."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kb import catalog
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.matcher import Matcher
from kb.diagnose.scan import scan
from kb.diagnose.source import Stream
from kb.entry import SECTIONS, Entry
from kb.fixtures import HealthyLog
from kb.index import Index
from kb.root import Root

QUESTIONS = Path(__file__).with_name("questions.jsonl")
HIGH = 0.8
RIGHT_FIRST, RIGHT_OF_THREE, WRONG_AND_SURE = 0.90, 0.97, 0.05
BUCKETS = (0.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.01)
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Case:
    """A log of a real question and the entries that are right, by people."""

    group: str
    log: str
    right: frozenset[str]


@dataclass(frozen=True)
class Answer:
    """What was said first of a case: the place of the first right entry (0 when none is), how sure, or nothing."""

    group: str
    place: int
    confidence: float
    is_unexplained: bool


def cases(path: Path) -> Iterator[Case]:
    for line in path.read_text(encoding="utf-8").splitlines():
        one = json.loads(line)
        if one["log"]:
            group = f"{one.get('split', path.stem)}, {one['lang']}"
            yield Case(group, one["log"], frozenset([*one["labels"], *one["also_ok"]]))


def ask(index: Index, matcher: Matcher, log: str) -> Diagnosis:
    return diagnose(index, scan([Stream("-", iter([log.encode()]))], matcher))


def accuracy(
    index: Index, matcher: Matcher, roots: Sequence[Root], files: Sequence[Path], failed: list[str]
) -> Iterator[str]:
    """The tables of accuracy and calibration. The bars are for the cases that development may see."""
    asked = [case for path in files for case in cases(path)]
    answers = [_answer(index, matcher, case) for case in asked]
    entries = list(catalog.load(tuple(roots)))
    engines = {
        "FTS5, one line an entry": FullText(
            {entry.id: f"{entry.id} {entry.meta.title} {entry.meta.title_zh}" for entry in entries}
        ),
        "FTS5, whole entries": FullText({entry.id: _whole(entry) for entry in entries}),
    }
    yield f"| logs | cases | first | of three | wrong first, confidence >= {HIGH} | not known | {' | '.join(engines)} |"
    yield "|---|---|---|---|---|---|" + "---|" * len(engines)
    for group in (*sorted({case.group for case in asked}), "all but held"):
        mine = [
            number
            for number, case in enumerate(asked)
            if case.group == group or (group == "all but held" and not case.group.startswith("held"))
        ]
        if not mine:
            continue
        chosen = [answers[number] for number in mine]
        first, three, sure = _shares(chosen)
        unknown = sum(one.is_unexplained for one in chosen) / len(chosen)
        theirs = [
            _place_shares([_place(engine.search(asked[number].log), asked[number]) for number in mine])
            for engine in engines.values()
        ]
        yield (
            f"| {group} | {len(mine)} | {first:.2f} | {three:.2f} | {sure:.2f} | {unknown:.2f} | "
            + " | ".join(theirs)
            + " |"
        )
        if group == "all but held" and (first < RIGHT_FIRST or three < RIGHT_OF_THREE or sure > WRONG_AND_SURE):
            failed.append(f"logs: first {first:.2f}, of three {three:.2f}, wrong and sure {sure:.2f}")
    yield ""
    yield from _calibration(answers)


def healthy(index: Index, matcher: Matcher, logs: Sequence[HealthyLog], failed: list[str]) -> Iterator[str]:
    found = {log.path.name: ask(index, matcher, log.text).findings for log in logs}
    wrong = {name: findings[0] for name, findings in found.items() if findings}
    yield f"{len(logs) - len(wrong)} of {len(logs)} logs of jobs that ended well have no finding."
    for name, finding in wrong.items():
        failed.append(f"{name}: {finding.id} ({finding.role}, {finding.confidence})")


class FullText:
    """SQLite's FTS5 with its own ranking: any word of a log may match, the best bm25 first."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE entries USING fts5(id UNINDEXED, text)")
        self._database.executemany("INSERT INTO entries VALUES (?, ?)", texts.items())

    def search(self, text: str) -> list[str]:
        query = " OR ".join(f'"{word}"' for word in dict.fromkeys(WORD.findall(text)))
        rows = self._database.execute("SELECT id FROM entries WHERE entries MATCH ? ORDER BY rank LIMIT 3", (query,))
        return [str(row[0]) for row in rows]


def _whole(entry: Entry) -> str:
    meta = entry.meta
    lines = [meta.title, meta.title_zh, *meta.aliases, *meta.tags, *(one.sample for one in meta.signatures)]
    return "\n".join([*lines, *(entry.section(heading) for heading in SECTIONS)])


def _answer(index: Index, matcher: Matcher, case: Case) -> Answer:
    found = ask(index, matcher, case.log)
    sure = found.findings[0].confidence if found.findings else 0.0
    return Answer(case.group, _place([one.id for one in found.findings], case), sure, found.unexplained)


def _place(ids: list[str], case: Case) -> int:
    return next((number for number, one in enumerate(ids, 1) if one in case.right), 0)


def _shares(answers: list[Answer]) -> tuple[float, float, float]:
    count = len(answers)
    first, three = (sum(0 < one.place <= most for one in answers) / count for most in (1, 3))
    return first, three, sum(one.place != 1 and one.confidence >= HIGH for one in answers) / count


def _place_shares(places: list[int]) -> str:
    first, three = (sum(0 < place <= most for place in places) / len(places) for most in (1, 3))
    return f"{first:.2f}, {three:.2f}"


def _calibration(answers: list[Answer]) -> Iterator[str]:
    yield "| confidence of the first | answers | of these right |"
    yield "|---|---|---|"
    for low, high in pairwise(BUCKETS):
        within = [one.place == 1 for one in answers if one.confidence and low <= one.confidence < high]
        if within:
            yield f"| {low:.2f} to {min(high, 1):.2f} | {len(within)} | {sum(within) / len(within):.2f} |"
