"""`/gaps`: questions without a good answer, for authors of entries."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.store import gaps

from ..state.content import StoreDatabase
from .page import page

MOST_GAPS = 50

router = APIRouter()


@router.get("/gaps")
def gaps_page(request: Request, database: StoreDatabase, after: str = "") -> HTMLResponse:
    rows = gaps.page(database, MOST_GAPS + 1, after or None)
    following = rows[MOST_GAPS - 1].digest if len(rows) > MOST_GAPS else ""
    return page(request, "gaps.html", gaps=rows[:MOST_GAPS], following=following, after=after)
