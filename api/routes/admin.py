"""POST /v1/admin/reindex, which puts new content in place in every replica, and GET /v1/admin/audit: who wrote what."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Annotated, Any, Self

from fastapi import APIRouter, Query, Request
from pydantic import AwareDatetime, BaseModel, ConfigDict

from kb.store import audit, content_generation
from kb.store.audit import AuditRecord

from ..requests import paging
from ..requests.access import Admin
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..state.content import StoreDatabase

LISTING = "audit"
MOST_AT_ONCE = 1000

router = APIRouter(prefix="/v1/admin", tags=["admin"])


class Reindexing(BaseModel):
    """Number of the content that every replica reads now. A replica that serves it says so in /metrics."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"generation": 3}]})
    generation: int


class AuditedDocument(BaseModel):
    """One write. `actor` is the id of a key, or who else it was; `subject` names what was written."""

    id: int
    at: AwareDatetime
    actor: str
    action: str
    subject: str
    request_id: str
    outcome: str

    @classmethod
    def of(cls, record: AuditRecord) -> Self:
        return cls(**{**asdict(record), "at": record.at.replace(tzinfo=datetime.UTC)})


AUDITED: dict[str, Any] = {
    "id": 7,
    "at": "2026-03-01T08:30:00Z",
    "actor": "k7v2m9qa",
    "action": "report.create",
    "subject": "reports/17",
    "request_id": "5d0c2a8e7f6b4b0e9a51c3d2e1f00a77",
    "outcome": "ok",
}


class AuditPage(BaseModel):
    """Writes, newest first. `next` is the cursor of the page after this one, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"audit": [AUDITED], "next": None}]})
    audit: tuple[AuditedDocument, ...]
    next: str | None


@router.post(
    "/reindex",
    operation_id="reindex",
    summary="Serve what the content roots hold now",
    status_code=202,
    response_model=Reindexing,
    responses=documented(503),
)
def reindex(request: Request, database: StoreDatabase, caller: Admin) -> Reindexing:
    """Every replica reads its content roots again within seconds, and answers from the old content until then."""
    number = content_generation.advance(database, actor=caller.id, request_id=request.state.id)
    return Reindexing(generation=number)


@router.get(
    "/audit",
    operation_id="listAudit",
    summary="Read who wrote what",
    response_model=AuditPage,
    responses=documented(422, 503),
)
def list_audit(
    database: StoreDatabase,
    _: Admin,
    limit: Annotated[int, Query(ge=1, le=MOST_AT_ONCE, description="At most this many writes.")] = 100,
    cursor: Cursor = None,
) -> AuditPage:
    """Newest first: keys made and revoked, reports, feedback, gaps forgotten, content read again."""
    found = audit.page(database, limit + 1, paging.number(LISTING, cursor))
    shown, following = paging.page(LISTING, found, limit, lambda one: one.id)
    return AuditPage(audit=tuple(map(AuditedDocument.of, shown)), next=following)
