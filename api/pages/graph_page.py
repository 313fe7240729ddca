"""`/graph`: the graph of causes by area, as a picture and as a list."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.content.area import Area
from kb.content.causes import Graph
from kb.content.causes_map import causes_map, without_implied
from kb.content.entry import FrontMatter

from ..state.content import ServedContent
from .page import address, chosen_language, language, page
from .translation import label

NO_AREA = "other"
LONGEST_TEXT = 200  # of a filter

router = APIRouter()


@router.get("/graph")
async def graph_page(request: Request, content: ServedContent, area: str = "", q: str = "") -> HTMLResponse:
    links, lang, chosen = content.links, language(request), chosen_language(request)
    metas = {id_: content.catalog.entries[id_].meta for id_ in links.titles}
    words = q[:LONGEST_TEXT].lower().split()
    matching = {id_ for id_, meta in metas.items() if area in ("", _area(meta)) and _contains(meta, words)}
    edges = [edge for edge in links.causes if matching & set(edge)]
    linked = {id_ for edge in edges for id_ in edge}
    is_filtered = bool(area or words)
    picture = causes_map(
        {label(name, lang): ids for name, ids in _by_area(linked, metas)},
        edges if is_filtered else without_implied(edges),
        lambda link: address(f"/entries/{link}", lang=chosen),
        linked - matching,
    )
    return page(
        request,
        "graph.html",
        picture=picture,
        groups=[(name, [_row(links, metas, id_) for id_ in ids]) for name, ids in _by_area(linked & matching, metas)],
        alone=[metas[id_] for id_ in sorted(matching - linked)],
        areas=[name for name, _ in _by_area(metas, metas)],
        area=area,
        q=q,
        count=len(matching),
        is_filtered=is_filtered,
    )


def _area(meta: FrontMatter) -> str:
    return str(meta.area or NO_AREA)


def _contains(meta: FrontMatter, words: Iterable[str]) -> bool:
    text = " ".join((meta.id, meta.title, meta.title_zh or "", *meta.tags)).lower()
    return all(word in text for word in words)


def _by_area(ids: Iterable[str], metas: dict[str, FrontMatter]) -> list[tuple[str, list[str]]]:
    """The areas that have entries, in their order, each with its entries."""
    by_area: dict[str, list[str]] = {}
    for id_ in sorted(ids):
        by_area.setdefault(_area(metas[id_]), []).append(id_)
    return [(name, by_area[name]) for name in (*map(str, Area), NO_AREA) if name in by_area]


def _row(links: Graph, metas: dict[str, FrontMatter], entry_id: str) -> dict[str, Any]:
    return {
        "entry": metas[entry_id],
        "causes": [metas[other] for other in links.causes_of(entry_id)],
        "consequences": [metas[other] for other in links.consequences_of(entry_id)],
    }
