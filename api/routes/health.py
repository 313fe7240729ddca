"""GET /healthz and /readyz: does the process answer, and can it answer questions?"""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request

from ..requests.problems import RETRY_S, documented
from ..schemas.content import Health, Readiness
from ..settings import Anonymous
from ..state.content import Loaded

NO_KEYS = "no key can be checked until the database is read"

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="health", summary="Is the process alive", response_model=Health)
async def health() -> Health:
    """Always 200: it looks at nothing."""
    return Health(status="ok")


@router.get(
    "/readyz",
    operation_id="readiness",
    summary="Can it answer questions",
    response_model=Readiness,
    responses=documented(503),
)
async def readiness(content: Loaded, request: Request) -> Readiness:
    """503 until the search index is open, and when it could not be opened; and where only keys get answers, while none
    can be checked."""
    state = request.app.state
    if state.settings.anonymous is Anonymous.NOBODY and not state.snapshot.knows_keys:
        raise HTTPException(503, NO_KEYS, {"Retry-After": RETRY_S})
    return Readiness(status="ready", entries=len(content.catalog))
