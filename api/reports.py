"""POST and GET /v1/reports: what verifications proved, sent by the nodes that ran them."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["reports"])
