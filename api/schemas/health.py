"""Health checks, described for OpenAPI."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Health(BaseModel):
    """The process answers."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ok"}]})
    status: str


class Readiness(BaseModel):
    """The process can answer questions."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"status": "ready", "entries": 24}]})
    status: str
    entries: int
