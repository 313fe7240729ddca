"""The audit log and reindexing, described for OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from .times import UtcTime

RECORD: dict[str, Any] = {
    "id": 7,
    "at": "2026-03-01T08:30:00Z",
    "actor": "k7v2m9qa",
    "action": "report.create",
    "subject": "reports/17",
    "request_id": "5d0c2a8e7f6b4b0e9a51c3d2e1f00a77",
    "outcome": "ok",
}


class Reindexing(BaseModel):
    """The generation that every replica reads now. A replica that serves it says so in /metrics."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"generation": 3}]})
    generation: int


class AuditedDocument(BaseModel):
    """One write. `actor` is the id of a key, or a name; `subject` names what was written."""

    model_config = ConfigDict(from_attributes=True)
    id: int
    at: UtcTime
    actor: str
    action: str
    subject: str
    request_id: str
    outcome: str


class AuditPage(BaseModel):
    """Writes, newest first. `next` is the cursor of the following page, null on the last one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"audit": [RECORD], "next": None}]})
    audit: tuple[AuditedDocument, ...]
    next: str | None
