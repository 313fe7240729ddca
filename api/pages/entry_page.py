"""`/entries/{id}`: an entry, its verdicts by hardware, and its place in the graph of causes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from kb.content import causes_svg
from kb.content.causes import Graph
from kb.content.entry import Entry
from kb.content.html import section_html
from kb.records.libraries import library_summaries
from kb.records.releases import release_summary
from kb.search.document import chinese_cause

from ..state.application import application
from ..state.content import Content, ServedContent
from .page import LANGUAGES, address, chosen_language, language, page
from .verdicts import rows

IN_ENGLISH = ("Symptom", "Root cause", "Fix", "How to tell", "Why it works")
BELOW = ("Environment", "Known cases")
IN_CHINESE = {  # in reading order
    "症状": "symptom",
    "原因": "root-cause",
    "修复": "fix",
    "判断": "how-to-tell",
    "环境": "environment",
}

router = APIRouter()


@router.get("/entries/{entry_id}")
async def entry_page(request: Request, content: ServedContent, entry_id: str) -> Response:
    return render_entry(request, content, content.catalog.get(entry_id), language(request))


def render_entry(request: Request, content: Content, entry: Entry, lang: str) -> Response:
    """The page of an entry, in `en` or `zh`."""
    links = content.links
    above, below = sections(entry, lang, frozenset(content.catalog.entries), chosen_language(request))
    counts = application(request).snapshot.verdict_counts
    verdicts = rows(entry.id, entry.digest, counts, content.proofs.get(entry.id, ()))
    is_drawn = entry.id in links.titles
    return page(
        request,
        "entry.html",
        entry=entry,
        meta=entry.meta,
        cause_zh=chinese_cause(entry) if lang == "zh" else "",
        hardware=content.hardware[entry.id],
        releases=release_summary(content.releases.get(entry.id, ()), content.probe_digests[entry.id]),
        libraries=library_summaries(content.libraries.get(entry.id, ()), content.probe_digests[entry.id]),
        above=above,
        below=below,
        verdicts=verdicts,
        picture=_picture(links, entry.id, chosen_language(request)) if is_drawn else "",
        around=_around(content, entry.id) if is_drawn else [],
        service=str(request.base_url).rstrip("/"),
        is_thanked="helped" in request.query_params,
    )


def sections(
    entry: Entry, lang: str, known: frozenset[str], chosen: str = ""
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parts above the verdicts and the parts below, each with `id`, `heading`, `lang` and `html`.

    An entry without Chinese text is shown in English. A part has the same `id` in both languages, for links.
    """
    parts = entry.translation() if lang == "zh" else {}
    chinese = [
        _part(anchor, name, "zh", parts[name], known, chosen) for name, anchor in IN_CHINESE.items() if name in parts
    ]
    above = chinese or [_section(entry, name, known, chosen) for name in IN_ENGLISH]
    below = ("Why it works", "Known cases") if chinese else BELOW
    return above, [_section(entry, name, known, chosen) for name in below]


def _section(entry: Entry, heading: str, known: frozenset[str], chosen: str) -> dict[str, Any]:
    return _part(heading.lower().replace(" ", "-"), heading, "en", entry.section(heading), known, chosen)


def _part(anchor: str, heading: str, lang: str, text: str, known: frozenset[str], chosen: str) -> dict[str, Any]:
    return {"id": anchor, "heading": heading, "lang": LANGUAGES[lang], "html": linked_html(text, known, chosen)}


@lru_cache(maxsize=1024)
def linked_html(text: str, known: frozenset[str], lang: str = "") -> str:
    """Markdown as clean HTML, with links to known entries, in this language unless the browser decides."""
    return section_html(text, lambda entry: address(f"/entries/{entry}", lang=lang) if entry in known else "")


def _picture(links: Graph, entry_id: str, lang: str) -> str:
    return causes_svg.neighbourhood(links, entry_id, lambda link: address(f"/entries/{link}", lang=lang))


def _around(content: Content, entry_id: str) -> list[tuple[str, list[dict[str, str]]]]:
    """The content of the picture in words, for readers who cannot see it."""
    links = content.links
    headings = {
        "Caused by": links.causes_of(entry_id),
        "Leads to": links.consequences_of(entry_id),
        "Hidden by": links.masked_by(entry_id),
        "Hides": links.hides(entry_id),
    }
    return [(heading, [_titles(content, id_) for id_ in ids]) for heading, ids in headings.items() if ids]


def _titles(content: Content, entry_id: str) -> dict[str, str]:
    meta = content.catalog.entries[entry_id].meta
    return {"id": entry_id, "title": meta.title, "title_zh": meta.title_zh}
