"""How often the first finding for a log is right, compared with full-text search over the same entries."""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from kb.authoring.signature_tests import HealthyLog
from kb.content.catalog import load_catalog
from kb.content.entry import SECTIONS, Entry
from kb.content.roots import Root
from kb.diagnose.diagnosis import Diagnosis, diagnose
from kb.diagnose.inputs.sources import Stream
from kb.diagnose.next_step import LIKELY
from kb.diagnose.scan.scan import scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.search.index import Index
from tests.bench import admission

QUESTIONS = Path(__file__).with_name("questions.jsonl")
HIGH = 0.8
WRONG_AND_SURE = 0.05
OFFERED = 0.05  # share of the logs that no entry covers
BARS = {QUESTIONS.stem: (0.88, 0.92)}  # measured shares that are right first and among three; a worse result fails
GOALS = (0.90, 0.97)  # for other files of cases
BUCKETS = (0.0, 0.35, 0.5, 0.65, 0.8, 0.9, 1.01)
ALL = ", all but held"
WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Case:
    """A log from a real question, and the entries that people labelled as right."""

    file: str
    group: str
    log: str
    right: frozenset[str]

    @property
    def is_held_out(self) -> bool:
        return self.group.startswith("held")


@dataclass(frozen=True)
class Answer:
    """The place of the first right entry among the findings (0 if none), and the confidence of the first finding."""

    group: str
    place: int
    confidence: float
    is_unexplained: bool


def cases(path: Path) -> Iterator[Case]:
    for line in path.read_text(encoding="utf-8").splitlines():
        question = json.loads(line)
        if question.get("log"):
            group = f"{question.get('split', path.stem)}, {question['lang']}"
            right = frozenset([*question["labels"], *question.get("also_ok", [])])
            yield Case(path.stem, group, question["log"], right)


def ask(index: Index, matcher: Matcher, log: str) -> Diagnosis:
    return diagnose(index, scan([Stream("-", iter([log.encode()]))], matcher))


def accuracy(
    index: Index, matcher: Matcher, roots: Sequence[Root], files: Sequence[Path], failed: list[str]
) -> Iterator[str]:
    """The tables of accuracy and calibration. The bars apply to cases that are not held out."""
    logs = [case for path in files for case in cases(path)]
    all_cases = [case for case in logs if case.right]
    answers = [_answer(index, matcher, case) for case in all_cases]
    entries = list(load_catalog(tuple(roots)))
    engines = {
        "FTS5, one line an entry": FullText(
            {entry.id: f"{entry.id} {entry.meta.title} {entry.meta.title_zh}" for entry in entries}
        ),
        "FTS5, whole entries": FullText({entry.id: _whole(entry) for entry in entries}),
    }
    yield f"| logs | cases | first | of three | wrong first, confidence >= {HIGH} | unexplained | {' | '.join(engines)} |"
    yield "|---|---|---|---|---|---|" + "---|" * len(engines)
    for group, numbers in _groups(all_cases).items():
        members = [all_cases[number] for number in numbers]
        of_group = [answers[number] for number in numbers]
        first, three, sure = _shares(of_group)
        unknown = sum(answer.is_unexplained for answer in of_group) / len(of_group)
        others = [
            _place_shares([_place(engine.search(case.log), case) for case in members]) for engine in engines.values()
        ]
        yield (
            f"| {group} | {len(members)} | {first:.2f} | {three:.2f} | {sure:.2f} | {unknown:.2f} | "
            + " | ".join(others)
            + " |"
        )
        least = BARS.get(members[0].file, GOALS) if group.endswith(ALL) else (0.0, 0.0)
        if first < least[0] or three < least[1] or (group.endswith(ALL) and sure > WRONG_AND_SURE):
            failed.append(f"{group}: first {first:.2f}, of three {three:.2f}, wrong and sure {sure:.2f}")
    yield ""
    yield from _calibration(answers)
    yield ""
    yield from _admission(index, matcher, logs, engines)


def _admission(index: Index, matcher: Matcher, logs: Sequence[Case], engines: Mapping[str, FullText]) -> Iterator[str]:
    """What is offered for logs that no entry covers. FTS5 gets the best limit on its score, fitted to these logs."""
    threads = [admission.Thread(case.log, case.right, is_held=False) for case in logs]
    offers = {"kb": [_offer(ask(index, matcher, case.log)) for case in logs]}
    offers |= {name: [engine.offer(case.log) for case in logs] for name, engine in engines.items()}
    yield f"| {len(logs)} logs, {sum(not case.right for case in logs)} not covered | not covered, offered | covered, right and offered | disowned |"
    yield "|---|---|---|---|"
    for name, by_log in offers.items():
        pairs = list(zip(threads, by_log, strict=True))
        limit = LIKELY if name == "kb" else admission.lowest_limit(pairs, OFFERED)
        shares = admission.rates(pairs, limit)
        yield f"| {name} | {shares.false:.2f} | {shares.right:.2f} | {shares.disowned:.2f} |"


def _offer(diagnosis: Diagnosis) -> admission.Offer:
    """The first finding and its confidence, which is 0 if it does not explain the log."""
    if not diagnosis.findings:
        return "", 0.0
    first = diagnosis.findings[0]
    return first.id, 0.0 if diagnosis.unexplained else first.confidence


def _groups(all_cases: Sequence[Case]) -> dict[str, list[int]]:
    """Indexes of cases by split and language, and, for each file, of the cases that are not held out."""
    groups: dict[str, list[int]] = {}
    for number, case in sorted(enumerate(all_cases), key=lambda pair: pair[1].group):
        groups.setdefault(case.group, []).append(number)
    for number, case in enumerate(all_cases):
        if not case.is_held_out:
            groups.setdefault(f"{case.file}{ALL}", []).append(number)
    return groups


def healthy(index: Index, matcher: Matcher, logs: Sequence[HealthyLog], failed: list[str]) -> Iterator[str]:
    by_log = {log.path.name: ask(index, matcher, log.text).findings for log in logs}
    wrong = {name: findings[0] for name, findings in by_log.items() if findings}
    yield f"{len(logs) - len(wrong)} of {len(logs)} logs of jobs that ended well have no finding."
    for name, finding in wrong.items():
        failed.append(f"{name}: {finding.id} ({finding.role}, {finding.confidence})")


class FullText:
    """SQLite's FTS5 with its default ranking: any word of a log may match, and the best bm25 comes first."""

    def __init__(self, texts: dict[str, str]) -> None:
        self._database = sqlite3.connect(":memory:")
        self._database.execute("CREATE VIRTUAL TABLE entries USING fts5(id UNINDEXED, text)")
        self._database.executemany("INSERT INTO entries VALUES (?, ?)", texts.items())

    def search(self, text: str) -> list[str]:
        return [entry for entry, _ in self._hits(text)]

    def offer(self, text: str) -> admission.Offer:
        """The best entry and its score."""
        return next(iter(self._hits(text)), ("", 0.0))

    def _hits(self, text: str) -> list[admission.Offer]:
        query = " OR ".join(f'"{word}"' for word in dict.fromkeys(WORD.findall(text)))
        statement = "SELECT id, -rank FROM entries WHERE entries MATCH ? ORDER BY rank LIMIT 3"
        return list(self._database.execute(statement, (query,)))


def _whole(entry: Entry) -> str:
    meta = entry.meta
    lines = [meta.title, meta.title_zh, *meta.aliases, *meta.tags, *(signature.sample for signature in meta.signatures)]
    return "\n".join([*lines, *(entry.section(heading) for heading in SECTIONS)])


def _answer(index: Index, matcher: Matcher, case: Case) -> Answer:
    diagnosis = ask(index, matcher, case.log)
    confidence = diagnosis.findings[0].confidence if diagnosis.findings else 0.0
    place = _place([finding.id for finding in diagnosis.findings], case)
    return Answer(case.group, place, confidence, diagnosis.unexplained)


def _place(ids: list[str], case: Case) -> int:
    return next((number for number, id_ in enumerate(ids, 1) if id_ in case.right), 0)


def _shares(answers: list[Answer]) -> tuple[float, float, float]:
    count = len(answers)
    first, three = (sum(0 < answer.place <= most for answer in answers) / count for most in (1, 3))
    return first, three, sum(answer.place != 1 and answer.confidence >= HIGH for answer in answers) / count


def _place_shares(places: list[int]) -> str:
    first, three = (sum(0 < place <= most for place in places) / len(places) for most in (1, 3))
    return f"{first:.2f}, {three:.2f}"


def _calibration(answers: list[Answer]) -> Iterator[str]:
    yield "| confidence of the first | answers | of these right |"
    yield "|---|---|---|"
    for low, high in pairwise(BUCKETS):
        within = [answer.place == 1 for answer in answers if answer.confidence and low <= answer.confidence < high]
        if within:
            yield f"| {low:.2f} to {min(high, 1):.2f} | {len(within)} | {sum(within) / len(within):.2f} |"
