"""The routes of the pages and of their static files."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from . import (
    diagnose_page,
    entry_page,
    feedback_page,
    gaps_page,
    graph_page,
    reference_page,
    search_page,
    sign_in_page,
    ticket,
)
from .static_files import BY_ADDRESS

FOREVER = {"Cache-Control": "public, max-age=31536000, immutable"}

router = APIRouter(include_in_schema=False)
for _part in (
    search_page,
    entry_page,
    ticket,
    feedback_page,
    diagnose_page,
    gaps_page,
    graph_page,
    sign_in_page,
    reference_page,
):
    router.include_router(_part.router)


@router.get("/static/{name}")
async def static_file(name: str) -> Response:
    if name not in BY_ADDRESS:
        raise HTTPException(404)
    file = BY_ADDRESS[name]
    return Response(file.data, media_type=file.media_type, headers=FOREVER)
