"""`/entries/{id}/ticket`: an entry as plain text, to be pasted into a ticket."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse

from kb.content.entry import Entry
from kb.content.grades import without_marks
from kb.search.document import chinese_cause

from ..state.content import ServedContent
from .page import HEADERS, address, chosen_language, language

BLANK_LINES = re.compile(r"\n{3,}")

router = APIRouter()


@router.get("/entries/{entry_id}/ticket")
async def ticket_page(request: Request, content: ServedContent, entry_id: str) -> PlainTextResponse:
    entry = content.catalog.get(entry_id)
    url = str(request.base_url).rstrip("/") + address(f"/entries/{entry.id}", lang=chosen_language(request))
    return PlainTextResponse(ticket(entry, url, language(request)), headers=HEADERS)


def ticket(entry: Entry, url: str, lang: str) -> str:
    """Id, title, cause, fix and URL of an entry. A part without a translation is in English."""
    meta, chinese = entry.meta, lang == "zh"
    fix = (entry.translation().get("修复", "") if chinese else "") or entry.section("Fix")
    cause = (chinese_cause(entry) if chinese else "") or entry.cause
    headings = ("原因", "修复") if chinese else ("Cause", "Fix")
    return "\n\n".join(
        (
            f"{entry.id}: {(meta.title_zh if chinese else '') or meta.title}",
            f"{headings[0]}: {cause}",
            f"{headings[1]}:\n{BLANK_LINES.sub(chr(10) * 2, without_marks(fix)).strip()}",
            f"{url}\n",
        )
    )
