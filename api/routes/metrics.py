"""GET /metrics: counts and durations for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..state.application import application

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    operation_id="metrics",
    summary="Counts and durations for Prometheus",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}, "example": "kb_database_up 1.0\n"}}}},
)
async def metrics(request: Request) -> Response:
    """Metrics since the process started; with several workers, those of all workers."""
    return Response(application(request).metrics.text(), media_type=CONTENT_TYPE_LATEST)
