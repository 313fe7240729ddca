"""POST /v1/feedback: did an entry help, and on which kind of machine?"""

from __future__ import annotations

from fastapi import APIRouter

router = APIRouter(prefix="/v1", tags=["feedback"])
