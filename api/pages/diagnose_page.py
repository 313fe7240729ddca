"""`/diagnose`: a form for logs, and the entries that explain them, with the lines of evidence."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.diagnose.diagnosis import Diagnosis
from kb.errors import UsageError

from ..requests.upload import MOST_LOG_BYTES, upload
from ..state.application import application
from ..state.content import Content, ServedContent
from .entry_page import linked_html
from .excerpt import Texts, excerpts, texts
from .log_form import UploadedLog, parse_log_form
from .page import language, page

MOST_FINDINGS = 5
MOST_LINES = 4  # of a finding
MOST_FAILURES = 8
ROLES = {
    "root": ("cause", "a line that names this cause was printed"),
    "cascade": ("consequence", "a consequence of this was printed, mostly by the ranks that waited"),
    "last": ("ends here", "nothing failed in words; the log stops where this incident stops"),
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
    return _page(request, answer=diagnosis, **_view(content, diagnosis, neighbours, language(request)))


async def _diagnose(content: Content, logs: list[UploadedLog]) -> tuple[Diagnosis, Texts]:
    diagnosis = await content.diagnose([log.stream() for log in logs])
    lines = [line for finding in diagnosis.findings[:MOST_FINDINGS] for line in finding.evidence[:MOST_LINES]]
    lines += [failure.line for failure in diagnosis.failures[:MOST_FAILURES]]
    return diagnosis, await asyncio.get_running_loop().run_in_executor(content.scanning.threads, texts, logs, lines)


def _view(content: Content, diagnosis: Diagnosis, neighbours: Texts, lang: str) -> dict[str, Any]:
    known = frozenset(content.catalog.entries)
    failures = diagnosis.failures[:MOST_FAILURES]
    step = diagnosis.next_step
    return {
        "findings": [
            {"finding": finding, "excerpts": excerpts(finding.evidence[:MOST_LINES], neighbours)}
            for finding in diagnosis.findings[:MOST_FINDINGS]
        ],
        "seen": list(chain.from_iterable(excerpts([failure.line], neighbours) for failure in failures)),
        "next_step": linked_html(step.text, known, lang) if step else "",
    }


def _page(request: Request, status: int = 200, **values: Any) -> HTMLResponse:
    defaults = {"answer": None, "problem": None, "lang": language(request), "roles": ROLES, "most": MOST_LOG_BYTES}
    return page(request, "diagnose.html", status, **{**defaults, **values})
