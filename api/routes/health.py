"""GET /healthz and /readyz: health checks."""

from __future__ import annotations

from fastapi import APIRouter, HTTPException, Request

from ..requests.problems import RETRY_S, documented
from ..schemas.health import Health, Readiness
from ..settings import Anonymous
from ..state.application import application
from ..state.content import ServedContent

NO_KEYS = "keys cannot be checked until the database is read"

router = APIRouter(tags=["health"])


@router.get("/healthz", operation_id="health", summary="Is the process alive", response_model=Health)
async def health() -> Health:
    """Always 200, without any other check."""
    return Health(status="ok")


@router.get(
    "/readyz",
    operation_id="readiness",
    summary="Can it answer questions",
    response_model=Readiness,
    responses=documented(503),
)
async def readiness(content: ServedContent, request: Request) -> Readiness:
    """503 until the search index is open, if it could not be opened, and, if a key is required, while keys cannot be
    checked."""
    state = application(request)
    if state.settings.anonymous is Anonymous.NOBODY and not state.snapshot.knows_keys:
        raise HTTPException(503, NO_KEYS, {"Retry-After": RETRY_S})
    return Readiness(status="ready", entries=len(content.catalog))
