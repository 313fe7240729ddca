"""GET /healthz and /readyz: does the process answer, and can it answer questions?"""

from __future__ import annotations

from fastapi import APIRouter

from .content import Loaded
from .problems import documented
from .schemas import Health, Readiness

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
async def readiness(content: Loaded) -> Readiness:
    """503 until the search index is open, and when it could not be opened."""
    return Readiness(status="ready", entries=len(content.catalog))
