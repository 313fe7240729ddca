"""`/gaps`: what people asked and no entry answers, for those who write entries."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from kb.store import gaps

from ..state.content import StoreDatabase
from .page import page

SHOWN = 50

router = APIRouter()


@router.get("/gaps")
def gaps_page(request: Request, database: StoreDatabase, after: str = "") -> HTMLResponse:
    found = gaps.page(database, SHOWN + 1, after or None)
    following = found[SHOWN - 1].digest if len(found) > SHOWN else ""
    return page(request, "gaps.html", gaps=found[:SHOWN], following=following, after=after)
