"""`/diagnose`: a log in, the entries that explain it out, with the lines they rest on."""

from __future__ import annotations

import asyncio
from itertools import chain
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.diagnose.diagnosis import Diagnosis
from kb.errors import UsageError

from ..routes.diagnose import MOST_BYTES
from ..state.content import Content, Loaded
from ..state.scanning import begun
from .entry_page import section_html
from .excerpt import Texts, excerpts, texts
from .page import language, page
from .upload import Log, received

SHOWN = 5  # findings
SHOWN_LINES = 4  # of a finding
SHOWN_SEEN = 8
ROLES = {
    "root": ("cause", "a line that names this cause was printed"),
    "cascade": ("consequence", "what this leads to was printed, mostly by the ranks that waited"),
    "last": ("ends here", "nothing failed in words; the log stops where this incident stops"),
    "similar": ("similar words", "no signature of it was printed, only the wording is alike"),
}

router = APIRouter()


@router.get("/diagnose")
async def diagnose_form(request: Request) -> HTMLResponse:
    return _page(request)


@router.post("/diagnose")
async def diagnose_page(request: Request, content: Loaded) -> HTMLResponse:
    try:
        body = await begun(request.stream())
        async with content.uploading:
            logs = await received(request.headers, body)
            async with content.scanning.place:
                answer, near = await _diagnosed(content, logs)
    except UsageError as problem:
        return _page(request, 422, problem=problem)
    request.app.state.unanswered.note_diagnosis(answer)
    return _page(request, answer=answer, **_view(content, answer, near, language(request)))


async def _diagnosed(content: Content, logs: list[Log]) -> tuple[Diagnosis, Texts]:
    found = await content.scanning.begin([log.stream() for log in logs])
    answer = await content.diagnose(found)
    lines = [line for finding in answer.findings[:SHOWN] for line in finding.evidence[:SHOWN_LINES]]
    lines += [one.line for one in answer.seen[:SHOWN_SEEN]]
    return answer, await asyncio.get_running_loop().run_in_executor(content.scanning.threads, texts, logs, lines)


def _view(content: Content, answer: Diagnosis, near: Texts, lang: str) -> dict[str, Any]:
    known = frozenset(content.catalog.entries)
    step = answer.next_step
    return {
        "findings": [
            {"finding": finding, "excerpts": excerpts(finding.evidence[:SHOWN_LINES], near)}
            for finding in answer.findings[:SHOWN]
        ],
        "seen": list(chain.from_iterable(excerpts([one.line], near) for one in answer.seen[:SHOWN_SEEN])),
        "next_step": section_html(step.text, known, lang) if step else "",
    }


def _page(request: Request, status: int = 200, **shown: Any) -> HTMLResponse:
    given = {"answer": None, "problem": None, "lang": language(request), "roles": ROLES, "most": MOST_BYTES, **shown}
    return page(request, "diagnose.html", status, **given)
