"""GET /metrics: counts and durations for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(tags=["health"])
