"""`/entries/{id}`: an entry, its verdicts by hardware, and its place in the graph of causes."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kb.content import causes_svg
from kb.content.causes import Graph
from kb.content.entry import Entry
from kb.content.html import section_html
from kb.search.document import chinese_cause

from ..state.application import application
from ..state.content import Content, ServedContent
from .page import LANGUAGES, address, language, page
from .verdicts import rows

PART = re.compile(r"^### +(.+?) *$", re.MULTILINE)
IN_ENGLISH = ("Symptom", "Root cause", "Fix", "How to tell", "Why it works")
BELOW = ("Environment", "Known cases")
IN_CHINESE = ("症状", "原因", "修复", "环境")  # in reading order

router = APIRouter()


@router.get("/entries/{entry_id}")
async def entry_page(request: Request, content: ServedContent, entry_id: str) -> Response:
    return render_entry(request, content, content.catalog.get(entry_id), language(request))


def render_entry(request: Request, content: Content, entry: Entry, lang: str) -> Response:
    """The page of an entry, in `en` or `zh`."""
    links = content.links
    known = frozenset(content.catalog.entries)
    above, below = sections(entry, lang, known)
    counts = application(request).snapshot.verdict_counts
    verdicts = rows(entry.id, entry.digest, counts, content.proofs.get(entry.id, ()))
    is_drawn = entry.id in links.titles
    return page(
        request,
        "entry.html",
        entry=entry,
        meta=entry.meta,
        cause=(chinese_cause(entry) if lang == "zh" else "") or entry.cause,
        lang=lang,
        hardware=content.hardware[entry.id],
        above=above,
        below=below,
        verdicts=verdicts,
        picture=_picture(links, entry.id) if is_drawn else "",
        around=_around(links, entry.id) if is_drawn else [],
        service=str(request.base_url).rstrip("/"),
        is_thanked="helped" in request.query_params,
    )


def sections(entry: Entry, lang: str, known: frozenset[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parts above the verdicts and those below: `id`, `heading`, `lang` and `html` of each."""
    if lang == "en":
        return [_section(entry, name, known) for name in IN_ENGLISH], [_section(entry, name, known) for name in BELOW]
    parts = chinese_parts(entry.section("中文"))
    above = [_part(name, name, "zh", parts[name], known) for name in IN_CHINESE if name in parts]
    return above, [_section(entry, name, known) for name in (*IN_ENGLISH[3:], "Known cases")]


def chinese_parts(text: str) -> dict[str, str]:
    """The `###` parts of the section 中文 by their headings."""
    _, *pieces = PART.split(text)
    return dict(zip(pieces[::2], pieces[1::2], strict=True))


def _section(entry: Entry, heading: str, known: frozenset[str]) -> dict[str, Any]:
    return _part(heading.lower().replace(" ", "-"), heading, "en", entry.section(heading), known)


def _part(anchor: str, heading: str, lang: str, text: str, known: frozenset[str]) -> dict[str, Any]:
    return {"id": anchor, "heading": heading, "lang": LANGUAGES[lang], "html": linked_html(text, known, lang)}


@lru_cache(maxsize=1024)
def linked_html(text: str, known: frozenset[str], lang: str = "en") -> str:
    """Markdown as clean HTML, with links to the entries that are known."""
    lang = "" if lang == "en" else lang
    return section_html(text, lambda entry: address(f"/entries/{entry}", lang=lang) if entry in known else "")


def _picture(links: Graph, entry_id: str) -> str:
    return causes_svg.neighbourhood(links, entry_id, lambda link: f"/entries/{link}")


def _around(links: Graph, entry_id: str) -> list[tuple[str, list[dict[str, str]]]]:
    """The picture in words, for readers who cannot see it."""
    around = links.around(entry_id)
    headings = {
        "Caused by": around["caused_by"],
        "Leads to": around["causes"],
        "Hidden by": around["masked_by"],
        "Hides": around["masks"],
    }
    return [(heading, entries) for heading, entries in headings.items() if entries]
