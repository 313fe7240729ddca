"""POST /v1/admin/reindex, which makes every replica serve new content, and GET /v1/admin/audit, the audit log."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kb.store import audit, content_generation

from ..requests import paging
from ..requests.access import Admin
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..schemas.audit import AuditedDocument, AuditPage, Reindexing
from ..state.content import StoreDatabase

LISTING = "audit"
MOST_AT_ONCE = 1000

router = APIRouter(prefix="/v1/admin", tags=["admin"])


@router.post(
    "/reindex",
    operation_id="reindex",
    summary="Serve the current files of the content roots",
    status_code=202,
    response_model=Reindexing,
    responses=documented(503),
)
def reindex(request: Request, database: StoreDatabase, caller: Admin) -> Reindexing:
    """Every replica reads its content roots again within seconds and serves the old content until then."""
    number = content_generation.advance(database, actor=caller.id, request_id=request.state.id)
    return Reindexing(generation=number)


@router.get(
    "/audit",
    operation_id="listAudit",
    summary="Read the audit log",
    response_model=AuditPage,
    responses=documented(422, 503),
)
def list_audit(
    database: StoreDatabase,
    _: Admin,
    limit: Annotated[int, Query(ge=1, le=MOST_AT_ONCE, description="At most this many writes.")] = 100,
    cursor: Cursor = None,
) -> AuditPage:
    """Writes, newest first: keys created and revoked, reports, feedback, gaps removed, content read again."""
    records = audit.page(database, limit + 1, paging.number(LISTING, cursor))
    records, following = paging.page(LISTING, records, limit, lambda record: record.id)
    return AuditPage(audit=tuple(map(AuditedDocument.model_validate, records)), next=following)
