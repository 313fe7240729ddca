"""Answers for a language model: what it needs to decide and to cite, in few tokens. Pure.

A model gets the rest when it asks for more: a larger limit, other sections, or the file of an entry as a resource.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence, Sized
from dataclasses import asdict
from typing import Any

from kb.content.catalog import Catalog
from kb.content.entry import TRANSLATION, Entry
from kb.content.grades import MARK
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import Line
from kb.diagnose.finding import Finding
from kb.diagnose.questions import Question
from kb.search.results import Answer, Hit

from ..schemas.diagnosis import FixDocument, open_questions, shorten
from .exposure import EnvironmentDocument

Document = dict[str, Any]

BUDGET = 1500  # tokens of an answer, unless the model asks for more
WIDE = "\u2e80"  # where the scripts begin of which a character is a token: Chinese, Japanese, Korean
LONGEST_LINE = 200  # characters of a line of evidence
MOST_LINES = 2  # of each list of a diagnosis
SHORTER = ((3, 2), (3, 1), (2, 1), (1, 1))  # findings and lines of a diagnosis, from long to short
SECTIONS = ("Root cause", "Fix", "How to tell", "Symptom", "Why it works", "Known cases", "Environment")


def encode(document: Document) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def tokens(text: str) -> int:
    """An estimate that needs no tokenizer: a token is four characters, or one of a wide script."""
    wide = sum(character >= WIDE for character in text)
    return wide + (len(text) - wide + 3) // 4


def search_answer(answer: Answer, ask: Iterable[Question]) -> Document:
    document = {"hits": [_hit(hit) for hit in answer.hits], "answered": answer.answered}
    return document | _present(did_you_mean=answer.did_you_mean, ask=_questions(ask))


def incident(entry: Entry, hardware: str, headings: Sequence[str], language: str) -> Document:
    """The sections with these headings; without any, the most useful ones that fit the budget.

    Raises `UsageError` for a section that the entry does not have.
    """
    names = [entry.heading(heading) for heading in headings]
    if names:
        return _incident(entry, hardware, names)
    names = (
        [TRANSLATION]
        if language == "zh" and TRANSLATION in entry.sections
        else [name for name in SECTIONS if name in entry.sections]
    )
    document = _incident(entry, hardware, names[:1])
    for count in range(2, len(names) + 1):
        longer = _incident(entry, hardware, names[:count])
        if tokens(encode(longer)) > BUDGET:
            break
        document = longer
    return document


def diagnosis_answer(diagnosis: Diagnosis, catalog: Catalog, limit: int | None) -> Document:
    """With `limit` findings, or with as much as fits the budget."""
    if limit is not None:
        return _diagnosis(diagnosis, catalog, limit, MOST_LINES)
    documents = (_diagnosis(diagnosis, catalog, findings, lines) for findings, lines in SHORTER)
    return next((document for document in documents if tokens(encode(document)) <= BUDGET), None) or _diagnosis(
        diagnosis, catalog, *SHORTER[-1]
    )


def environment_answer(document: EnvironmentDocument, limit: int | None) -> Document:
    """With `limit` incidents, or with as many as fit the budget."""
    head = _present(packages=document.packages, gpu=document.gpu)
    checks = None if document.checks is None else [check.model_dump(exclude_none=True) for check in document.checks]
    incidents = [_present(**item.model_dump(exclude={"title", "status"})) for item in document.incidents]
    tail: Document = {"incidents_of_any_version": len(document.any_version), "checks": checks}

    def build(count: int) -> Document:
        omitted = len(incidents) - count
        return head | {"incidents": incidents[:count]} | _present(incidents_omitted=omitted or None) | tail

    if limit is not None:
        return build(min(limit, len(incidents)))
    counts = range(len(incidents), 0, -1)
    return build(next((count for count in counts if tokens(encode(build(count))) <= BUDGET), 0))


def _hit(hit: Hit) -> Document:
    document = asdict(hit)
    names = ("id", "title", "cause", "status", "severity", "score", "matched")
    optional = _present(signature=hit.signature, can_be_verified=bool(hit.probe))
    if hit.verified_on:
        optional["verified_on"] = {"reports": hit.verified_on.reports, "reason": hit.verified_on.reason}
    return {name: document[name] for name in names} | optional


def _diagnosis(diagnosis: Diagnosis, catalog: Catalog, limit: int, lines: int) -> Document:
    short = shorten(diagnosis, limit, lines)
    ranks, step = diagnosis.ranks, diagnosis.next_step
    document = {
        "findings": [_finding(finding, catalog.entries.get(finding.id)) for finding in short.findings],
        "unexplained": diagnosis.unexplained,
        "lines_read": diagnosis.lines,
    }
    return document | _present(
        findings_omitted=(len(diagnosis.findings) - len(short.findings)) or None,
        first_failure=ranks.first_failure and _line(ranks.first_failure),
        absent_ranks=ranks.absent,
        observations=[_line(line) for line in short.observations],
        failure_lines=[_line(failure.line) | {"count": failure.count} for failure in short.failures],
        next_step=step and _present(text=step.text, source=step.source, command=step.command),
        ask=_questions(open_questions(diagnosis, catalog)),
        problems=diagnosis.problems,
    )


def _incident(entry: Entry, hardware: str, names: Sequence[str]) -> Document:
    meta = entry.meta
    sections = {name: entry.section(name) for name in names}
    document = {"id": entry.id, "title": meta.title, "status": meta.status.value, "severity": meta.severity.value}
    facts = _present(
        applies_to=meta.applies_to,
        fixed_in=meta.fixed_in,
        causes=meta.causes,
        caused_by=meta.caused_by,
        masked_by=meta.masked_by,
        verify=f"kb verify {entry.id}" if meta.probe else "",
        hardware=hardware,
    )
    more = [name for name in entry.sections if name not in sections]
    references = _references(entry, sections.values())
    return document | facts | {"sections": sections} | _present(references=references, more_sections=more)


def _references(entry: Entry, texts: Iterable[str]) -> dict[str, str]:
    """The addresses to which the marks in some texts refer, by number."""
    numbers = sorted({int(match[3]) for text in texts for match in MARK.finditer(text) if match[3]})
    references = entry.meta.references
    return {str(number): references[number - 1].url for number in numbers if number <= len(references)}


def _finding(finding: Finding, entry: Entry | None) -> Document:
    names = ("id", "title", "cause", "status", "role", "confidence")
    fix = FixDocument.of(entry) if entry else None
    return {name: getattr(finding, name) for name in names} | _present(
        lines=finding.count or None,
        ranks=finding.ranks,
        evidence=[_line(line) for line in finding.evidence],
        caused_by=finding.caused_by,
        against=[_cut(objection) for objection in finding.against],
        fix=fix and fix.model_dump(),
        verify=f"kb verify {finding.id}" if finding.probe else "",
    )


def _line(line: Line) -> Document:
    cited = line.to_json()
    return _present(line=cited["line"], rank=line.rank, time=cited["time"]) | {"text": _cut(line.text)}


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_LINE else f"{text[: LONGEST_LINE - 1]}…"


def _questions(ask: Iterable[Question]) -> list[Document]:
    return [
        {"question": question.text, "answers": [_present(**asdict(choice)) for choice in question.choices]}
        for question in ask
    ]


def _present(**members: Any) -> Document:
    """Without what is empty, which would cost tokens and say nothing. A rank may be 0."""
    return {name: value for name, value in members.items() if not _is_empty(value)}


def _is_empty(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, Sized) and not len(value))
