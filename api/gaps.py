"""GET /v1/gaps: questions that no entry answered well, counted and redacted."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["gaps"])
