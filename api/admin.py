"""POST /v1/admin/reindex: serve what the content roots hold now."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["admin"])
