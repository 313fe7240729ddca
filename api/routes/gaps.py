"""GET and DELETE /v1/gaps: questions that no entry answered well, counted and redacted."""

from __future__ import annotations

import datetime
from dataclasses import asdict
from typing import Annotated, Any, Self

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from kb.errors import UsageError
from kb.store import gaps
from kb.store.gaps import Gap

from ..requests import paging
from ..requests.access import Admin
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..state.content import Kept

LISTING = "gaps"
DIGEST = "2b8e1f1d1c0b6f3a9d8c7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b"
EXAMPLE: dict[str, Any] = {
    "digest": DIGEST,
    "kind": "search",
    "text": "ncclCommSplit hangs after a rank was replaced on <host-1>",
    "count": 7,
    "first": "2026-03-01T08:30:00Z",
    "last": "2026-03-04T17:02:11Z",
    "best": "rendezvous-timeout",
}

router = APIRouter(prefix="/v1/gaps", tags=["gaps"])


class GapDocument(BaseModel):
    """A question that was asked `count` times and that no entry answers."""

    digest: str = Field(description="What tells it from others.")
    kind: str = Field(description="`search` for a question, `diagnose` for the lines of a log that nothing explained.")
    text: str = Field(description="In one line, cut, without names and secrets.")
    count: int
    first: AwareDatetime = Field(description="When it was asked first.")
    last: AwareDatetime = Field(description="When it was asked last.")
    best: str = Field(description="The entry that came nearest; empty when none did.")

    @classmethod
    def of(cls, one: Gap) -> Self:
        times = {name: getattr(one, name).replace(tzinfo=datetime.UTC) for name in ("first", "last")}
        return cls(**{**asdict(one), **times})


class GapPage(BaseModel):
    """Gaps, the most frequent first. `next` is the cursor of the following page, null on the last one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"gaps": [EXAMPLE], "next": None}]})
    gaps: tuple[GapDocument, ...]
    next: str | None


@router.get(
    "",
    operation_id="listGaps",
    summary="Read what was asked and not answered",
    response_model=GapPage,
    responses=documented(422, 503),
)
def list_gaps(
    database: Kept,
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many gaps.")] = 100,
    cursor: Cursor = None,
) -> GapPage:
    """For authors: what to write next. A question counts when the answer of `search` says `answered: false`."""
    after = paging.position(LISTING, cursor)
    shown, following = paging.page(LISTING, gaps.page(database, limit + 1, after), limit, lambda one: one.digest)
    return GapPage(gaps=tuple(map(GapDocument.of, shown)), next=following)


@router.delete(
    "/{digest}",
    operation_id="forgetGap",
    summary="Remove a gap that is closed",
    status_code=204,
    responses=documented(404, 422, 503),
)
def forget_gap(
    request: Request,
    database: Kept,
    caller: Admin,
    digest: Annotated[str, Path(pattern="^[0-9a-f]{64}$", description="The digest of a gap.", examples=[DIGEST])],
) -> Response:
    """For an entry that was written, or a question that is none. It is counted from one when it comes again."""
    try:
        gaps.forget(database, digest, actor=caller.id, request_id=request.state.id)
    except UsageError as error:
        raise HTTPException(404, error.message) from None
    return Response(status_code=204)
