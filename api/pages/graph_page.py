"""`/graph`: the graph of causes."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.content import causes_svg

from ..state.content import ServedContent
from .page import page

router = APIRouter()


@router.get("/graph")
async def graph_page(request: Request, content: ServedContent) -> HTMLResponse:
    links = content.links
    linked = {entry for edge in links.causes for entry in edge}
    return page(
        request,
        "graph.html",
        picture=causes_svg.whole(links, lambda link: f"/entries/{link}"),
        causes=[(cause, links.consequences_of(cause)) for cause in sorted({cause for cause, _ in links.causes})],
        alone=sorted(set(links.titles) - linked),
        titles=links.titles,
    )
