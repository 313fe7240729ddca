"""`/diagnose`: a form for logs, and the entries that explain them, with the lines of evidence."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.content.languages import CHINESE
from kb.content.triage import first_observations
from kb.diagnose.chinese_step import chinese_step
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import DERIVED_PREFIX, Line
from kb.diagnose.finding import Finding
from kb.diagnose.next_step import LIKELY
from kb.diagnose.story.picture import extent, row_text, svg_picture
from kb.errors import UsageError

from ..requests.upload import MOST_LOG_BYTES, upload
from ..state.application import application
from ..state.content import Content, ServedContent
from .entry_page import linked_html
from .excerpt import Excerpt, Texts, excerpts, texts
from .log_form import UploadedLog, parse_log_form
from .page import LANGUAGES, chosen_language, language, page

MOST_FINDINGS = 5
MOST_LINES = 4  # per finding
MOST_FAILURES = 8
ROLES = {
    "root": ("cause", "a line that names this cause was printed"),
    "cascade": ("consequence", "a consequence of this was printed, mostly by the ranks that waited"),
    "last": ("ends here", "no error was printed; the log stops where this incident stops"),
    "similar": ("similar words", "no signature of it matched, only the wording is similar"),
}

router = APIRouter()


@router.get("/diagnose")
async def diagnose_form(request: Request) -> HTMLResponse:
    return _page(request)


@router.post("/diagnose")
async def diagnose_page(request: Request, content: ServedContent) -> HTMLResponse:
    try:
        body = upload(request)
        await body.start()
        async with content.uploading:
            logs = await parse_log_form(request.headers, body.stream())
            diagnosis, neighbours = await _diagnose(content, logs)
    except UsageError as problem:
        return _page(request, 422, problem=problem)
    application(request).gaps.add_diagnosis(diagnosis)
    view = _view(content, diagnosis, neighbours, language(request), chosen_language(request))
    return _page(request, answer=diagnosis, **view)


async def _diagnose(content: Content, logs: list[UploadedLog]) -> tuple[Diagnosis, Texts]:
    diagnosis = await content.diagnose([log.stream() for log in logs])
    lines = [line for finding in diagnosis.findings[:MOST_FINDINGS] for line in finding.evidence[:MOST_LINES]]
    lines += [failure.line for failure in diagnosis.failures[:MOST_FAILURES]]
    if diagnosis.ranks.first_failure:
        lines.append(diagnosis.ranks.first_failure)
    return diagnosis, await asyncio.get_running_loop().run_in_executor(content.scanning.threads, texts, logs, lines)


def _view(content: Content, diagnosis: Diagnosis, neighbours: Texts, lang: str, chosen: str) -> dict[str, Any]:
    """The values for the template. Only an entry that is likely to explain the log is shown with its fix."""
    findings = list(diagnosis.findings[:MOST_FINDINGS])
    likely = [] if diagnosis.is_cause_unknown else [finding for finding in findings if finding.confidence >= LIKELY]
    failures = [failure.line for failure in diagnosis.failures[:MOST_FAILURES]]
    first = diagnosis.ranks.first_failure or next(iter(failures), None)
    is_explained = bool(likely) and not diagnosis.unexplained
    others = failures if is_explained else [line for line in failures if line != first]
    step = None  # if the cause is unknown, the page shows it next to the first failure
    if not diagnosis.is_cause_unknown:
        step = chinese_step(diagnosis, content.catalog.get) if lang == "zh" else diagnosis.next_step
    return {
        "nothing_read": bool(diagnosis.problems) and not (diagnosis.lines or diagnosis.observations or findings),
        "is_explained": is_explained,
        "first": excerpts([first], neighbours) if first else [],
        "rank": diagnosis.ranks.failed_first,
        "findings": _items(likely if is_explained else [], neighbours),
        "weaker": _items([finding for finding in findings if not (is_explained and finding in likely)], neighbours),
        "seen": [excerpt for line in others for excerpt in excerpts([line], neighbours)],
        "triage": first_observations(content.triage, diagnosis.facets),
        "attempts": _attempts(diagnosis),
        "next_step": _step(step.text, frozenset(content.catalog.entries), chosen) if step else None,
    }


def _attempts(diagnosis: Diagnosis) -> list[dict[str, Any]]:
    """The timelines of a job that ran on several ranks or that failed."""
    attempts = [attempt for attempt in diagnosis.story.attempts if len(attempt.rows) > 1 or diagnosis.story.facts]
    return [
        {"svg": svg_picture(attempt), "extent": extent(attempt), "rows": [(row, row_text(row)) for row in attempt.rows]}
        for attempt in attempts
    ]


def _items(findings: list[Finding], neighbours: Texts) -> list[dict[str, Any]]:
    """Findings with their lines. Lines that several findings cite are shown once."""
    items: list[dict[str, Any]] = []
    shown: list[list[Excerpt]] = []
    for finding in findings:
        lines = excerpts(finding.evidence[:MOST_LINES], neighbours)
        is_repeated = lines in shown
        shown.append(lines)
        evidence = citation(finding.evidence[0]) if finding.evidence else ""
        items.append(
            {
                "finding": finding,
                "excerpts": [] if is_repeated else lines,
                "is_repeated": is_repeated and bool(lines),
                "evidence": evidence,
            }
        )
    return items


def citation(line: Line) -> str:
    """A line in the form in which a ticket cites it."""
    rank = "" if line.rank is None else f" (rank {line.rank})"
    return f"{line.place}{rank}: {line.text.removeprefix(DERIVED_PREFIX)}"


def _step(text: str, known: frozenset[str], chosen: str) -> dict[str, str]:
    """A step with its language: the page's, or English if the entry has no Chinese text."""
    lang = "zh" if CHINESE.search(text) else "en"
    return {"html": linked_html(text, known, chosen), "lang": LANGUAGES[lang]}


def _page(request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    defaults = {"answer": None, "problem": None, "roles": ROLES, "most": MOST_LOG_BYTES}
    return page(request, "diagnose.html", status, **{**defaults, **values})
