"""The addresses of the pages, and of what they are drawn with."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from . import diagnose_page, entry_page, feedback_page, gaps_page, graph_page, search_page, sign_in_page
from .static_files import BY_ADDRESS

FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}

router = APIRouter(include_in_schema=False)
for _part in (search_page, entry_page, feedback_page, diagnose_page, gaps_page, graph_page, sign_in_page):
    router.include_router(_part.router)


@router.get("/static/{name}")
async def static_file(name: str) -> Response:
    if name not in BY_ADDRESS:
        raise HTTPException(404)
    found = BY_ADDRESS[name]
    return Response(found.data, media_type=found.media_type, headers=FOREVER)
