"""GET and DELETE /v1/gaps: questions and logs without a good answer, counted and redacted."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from kb.errors import UsageError
from kb.store import gaps

from ..requests import paging
from ..requests.access import Admin
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..schemas.gaps import DIGEST, GapDocument, GapPage
from ..state.content import StoreDatabase

LISTING = "gaps"

router = APIRouter(prefix="/v1/gaps", tags=["gaps"])


@router.get(
    "",
    operation_id="listGaps",
    summary="List questions without a good answer",
    response_model=GapPage,
    responses=documented(422, 503),
)
def list_gaps(
    database: StoreDatabase,
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many gaps.")] = 100,
    cursor: Cursor = None,
) -> GapPage:
    """Gaps show authors what to write next. A question is a gap if its search says `answered: false`."""
    after = paging.position(LISTING, cursor)
    rows, following = paging.page(LISTING, gaps.page(database, limit + 1, after), limit, lambda gap: gap.digest)
    return GapPage(gaps=tuple(map(GapDocument.model_validate, rows)), next=following)


@router.delete(
    "/{digest}",
    operation_id="forgetGap",
    summary="Remove a gap that is closed",
    status_code=204,
    responses=documented(404, 422, 503),
)
def forget_gap(
    request: Request,
    database: StoreDatabase,
    caller: Admin,
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The digest of a gap.", examples=[DIGEST])],
) -> Response:
    """Remove a gap whose entry is written or that kb is not meant to answer. If asked again, it counts from one."""
    try:
        gaps.forget(database, digest, actor=caller.id, request_id=request.state.id)
    except UsageError as error:
        raise HTTPException(404, error.message) from None
    return Response(status_code=204)
