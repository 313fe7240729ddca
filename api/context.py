"""GET /v1/context: a cited block of claims for a language model."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["context"])
