"""Answers for a language model: what it needs to decide and to cite, in few tokens. Pure.

A model can ask for the rest with a larger limit, other sections, or the file of an entry as a resource.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from kb.content.catalog import Catalog
from kb.content.entry import TRANSLATION, Entry
from kb.content.grades import MARK
from kb.content.parser import text_blocks
from kb.content.triage import Triage, first_observations
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import Failure, Line
from kb.diagnose.finding import Finding
from kb.diagnose.questions import Question
from kb.search.gap import gap
from kb.search.results import Answer, Hit

from ..schemas.diagnosis import FixDocument, open_questions, shorten
from .exposure import EnvironmentDocument

Document = dict[str, Any]

BUDGET = 1500  # tokens of an answer, unless the model asks for more
# What tokenizers usually make into one token: up to 7 letters, 3 digits or 3 marks; a character of any other script.
PIECE = re.compile(r"[A-Za-z]{1,7}|[0-9]{1,3}|[^\x00-\x7f]|[^\w\s]{1,3}|_|\n+")
LONGEST_LINE, SHORT_LINE = 200, 120  # characters of a line of evidence, with and without room
QUOTED = 80  # an observation quotes a failure line if it contains so many of its characters
MOST_LINES = 2  # in each list of a diagnosis
MOST_OBSERVATIONS = 1  # in a triage
MOST_POINTED = (6, 4, 2)  # entries shown for one outcome of an observation: the most that fit the budget
HEALTHY = "no line reports a failure; of a job that hangs, send the stacks: `py-spy dump --pid` on each rank"
SHORTER = ((3, 2), (3, 1), (2, 1), (1, 1))  # findings and lines of a diagnosis, from long to short
SECTIONS = ("Root cause", "Fix", "How to tell")  # of an incident, unless the model asks for others


def encode(document: Document) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def tokens(text: str) -> int:
    """Estimate the tokens of a text without a tokenizer. For names and numbers, counting characters is 20 % too low."""
    return sum(1 for _ in PIECE.finditer(text))


def search_answer(answer: Answer, ask: Iterable[Question], triage: Triage) -> Document:
    document = {"kind": answer.kind.value, "hits": [_hit(hit) for hit in answer.hits], "answered": answer.answered}
    instead, asked = gap(answer, triage), _questions(ask)

    def build(pointed: int) -> Document:
        shortened = instead | {"triage": _triage(instead["triage"], pointed)}
        return document | present(did_you_mean=answer.did_you_mean, ask=asked, **shortened)

    *longer, fewest = MOST_POINTED
    documents = map(build, longer)
    return next((each for each in documents if tokens(encode(each)) <= BUDGET), None) or build(fewest)


def incident(entry: Entry, on_record: Mapping[str, Any], headings: Sequence[str], language: str) -> Document:
    """An entry with the sections under these headings, or as much of the most useful ones as fits the budget.

    Raises `UsageError` for a section that the entry does not have.
    """
    if headings:
        names = [entry.heading(heading) for heading in headings]
        return _incident(entry, on_record, {name: entry.section(name) for name in names})
    names = [TRANSLATION] if language == "zh" else list(SECTIONS)
    parts = {name: list(_blocks(entry.section(name))) for name in names if name in entry.sections}
    first = [(name, parts[name].pop(0)) for name in list(parts)[:1]]  # a sentence about what happened; then the fix
    fix_first = sorted(parts, key=lambda name: name != "Fix")
    blocks = [*first, *((name, block) for name in fix_first for block in parts[name])]

    def build(count: int) -> Document:
        texts: dict[str, str] = {}
        for name, block in blocks[:count]:
            texts[name] = texts.get(name, "") + block
        return _incident(entry, on_record, texts)

    most = bisect_right(range(len(blocks)), BUDGET, key=lambda index: tokens(encode(build(index + 1))))
    return build(max(most, 1))


def _blocks(markdown: str) -> Iterator[str]:
    """The paragraphs and list items of a text, each with its code. An answer contains them only as a whole."""
    lines = markdown.splitlines(keepends=True)
    starts = [start for start, _, code in text_blocks(markdown) if code is None]
    for start, end in pairwise([0, *starts[1:], len(lines)]):
        yield "".join(lines[start:end])


def diagnosis_answer(diagnosis: Diagnosis, catalog: Catalog, triage: Triage, limit: int | None) -> Document:
    """A diagnosis with `limit` findings, or with as much as fits the budget."""
    if limit is not None:
        return _diagnosis(diagnosis, catalog, triage, limit, MOST_LINES)
    documents = [_diagnosis(diagnosis, catalog, triage, findings, lines) for findings, lines in SHORTER]
    return next((document for document in documents if tokens(encode(document)) <= BUDGET), documents[-1])


def environment_answer(document: EnvironmentDocument, limit: int | None) -> Document:
    """The exposure of an environment with `limit` incidents, or with as many as fit the budget."""
    head = present(packages=document.packages, gpu=document.gpu)
    checks = None if document.checks is None else [check.model_dump(exclude_none=True) for check in document.checks]
    incidents = [present(**item.model_dump(exclude={"title", "status"})) for item in document.incidents]
    tail: Document = {"incidents_of_any_version": len(document.any_version), "checks": checks}

    def build(count: int) -> Document:
        omitted = len(incidents) - count
        return head | {"incidents": incidents[:count]} | present(incidents_omitted=omitted or None) | tail

    if limit is not None:
        return build(min(limit, len(incidents)))
    counts = range(len(incidents), 0, -1)
    return build(next((count for count in counts if tokens(encode(build(count))) <= BUDGET), 0))


def _hit(hit: Hit) -> Document:
    document = asdict(hit)
    names = ("id", "title", "cause", "status", "severity", "score", "matched")
    optional = present(signature=hit.signature, can_be_verified=bool(hit.probe))
    if hit.difference:
        optional["difference"] = asdict(hit.difference)
    if hit.verified_on:
        optional["verified_on"] = {"reports": hit.verified_on.reports, "reason": hit.verified_on.reason}
    return {name: document[name] for name in names} | optional


def _diagnosis(diagnosis: Diagnosis, catalog: Catalog, triage: Triage, limit: int, lines: int) -> Document:
    short = shorten(diagnosis, limit, lines)
    ranks, step, asked = diagnosis.ranks, diagnosis.next_step, first_observations(triage, diagnosis.facets)
    document = {
        "findings": [_finding(finding, catalog.entries.get(finding.id)) for finding in short.findings],
        "unexplained": diagnosis.unexplained,
        "lines_read": diagnosis.lines,
    }
    return document | present(
        findings_omitted=(len(diagnosis.findings) - len(short.findings)) or None,
        first_failure=ranks.first_failure and _line(ranks.first_failure),
        absent_ranks=ranks.absent,
        observations=[_line(line, SHORT_LINE if lines == 1 else LONGEST_LINE) for line in short.observations],
        failure_lines=[_line(failure.line) | {"count": failure.count} for failure in _unobserved(short)],
        next_step=step and present(text=step.text, source=step.source, command=step.command),
        triage=_triage([each.to_json(in_chinese=False) for each in asked], MOST_POINTED[0]),
        ask=_questions(open_questions(diagnosis, catalog)),
        problems=diagnosis.problems,
        note="" if diagnosis.findings or diagnosis.failures or not diagnosis.lines else HEALTHY,
    )


def _unobserved(diagnosis: Diagnosis) -> Iterator[Failure]:
    """The failure lines that no observation quotes."""
    observed = [line.text for line in diagnosis.observations]
    return (
        failure for failure in diagnosis.failures if not any(failure.line.text[:QUOTED] in text for text in observed)
    )


def _incident(entry: Entry, on_record: Mapping[str, Any], texts: Mapping[str, str]) -> Document:
    """An entry with these texts of sections. Sections that are incomplete or absent are listed in `more_sections`."""
    meta = entry.meta
    document = {"id": entry.id, "title": meta.title, "status": meta.status.value, "severity": meta.severity.value}
    facts = present(
        applies_to=meta.applies_to,
        fixed_in=meta.fixed_in,
        causes=meta.causes,
        caused_by=meta.caused_by,
        masked_by=meta.masked_by,
        verify=f"kb verify {entry.id}" if meta.probe else "",
        **on_record,
    )
    whole = {name: text == entry.section(name) for name, text in texts.items()}
    sections = {name: text if whole[name] else f"{text.rstrip()}\n…" for name, text in texts.items()}
    more = [name for name in entry.sections if not whole.get(name)]
    references = _references(entry, texts.values())
    return document | facts | {"sections": sections} | present(references=references, more_sections=more)


def _references(entry: Entry, texts: Iterable[str]) -> dict[str, str]:
    """The URLs that the marks in these texts refer to, by number."""
    numbers = sorted({int(match["number"]) for text in texts for match in MARK.finditer(text) if match["number"]})
    references = entry.meta.references
    return {str(number): references[number - 1].url for number in numbers if number <= len(references)}


def _finding(finding: Finding, entry: Entry | None) -> Document:
    names = ("id", "title", "cause", "status", "role", "confidence")
    fix = FixDocument.of(entry, finding.fix_number) if entry else None
    return {name: getattr(finding, name) for name in names} | present(
        lines=finding.count or None,
        ranks=finding.ranks,
        evidence=[_line(line) for line in finding.evidence],
        caused_by=finding.caused_by,
        against=[cut(objection) for objection in finding.against],
        fix=fix and fix.model_dump(),
        verify=f"kb verify {finding.id}" if finding.probe else "",
    )


def _line(line: Line, most: int = LONGEST_LINE) -> Document:
    cited = line.to_json()
    return present(line=cited["line"], rank=line.rank, time=cited["time"]) | {"text": cut(line.text, most)}


def cut(text: str, most: int = LONGEST_LINE) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _triage(observations: Sequence[Document], pointed: int) -> list[Document]:
    """The first observations, each outcome with at most `pointed` entries and the number of omitted ones."""
    return [
        observation | {"outcomes": [_outcome(outcome, pointed) for outcome in observation["outcomes"]]}
        for observation in observations[:MOST_OBSERVATIONS]
    ]


def _outcome(outcome: Document, pointed: int) -> Document:
    entries = outcome["points_to"]
    return outcome | {"points_to": entries[:pointed]} | present(omitted=max(0, len(entries) - pointed) or None)


def _questions(ask: Iterable[Question]) -> list[Document]:
    return [
        {"question": question.text, "answers": [present(**asdict(choice)) for choice in question.choices]}
        for question in ask
    ]


def present(**members: Any) -> Document:
    """A document without empty members, which would only cost tokens. Numbers are kept: a rank may be 0."""
    return {name: value for name, value in members.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Sized) and not len(value))
