"""POST and GET /v1/feedback: did an entry help, and on which kind of machine."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kb.shared_report import LINE, SHOWN, one_line
from kb.store import feedback

from . import paging
from .access import Reader
from .content import Kept, Loaded
from .paging import Cursor
from .problems import documented
from .schemas import FeedbackCount, FeedbackDocument, FeedbackPage

LISTING = "feedback"

router = APIRouter(prefix="/v1/feedback", tags=["feedback"])


@router.post(
    "",
    operation_id="postFeedback",
    summary="Say whether an entry helped",
    status_code=201,
    response_model=FeedbackDocument,
    responses=documented(404, 413, 422, 503),
)
def post_feedback(
    request: Request, content: Loaded, database: Kept, caller: Reader, given: FeedbackDocument
) -> FeedbackDocument:
    """Counted for the authors of the entry. The comment is kept as it is answered: without names and secrets."""
    entry = content.catalog.get(given.entry)
    clean = given.model_copy(update={"comment": one_line(given.comment, LINE)})
    feedback.add(
        database,
        entry.id,
        clean.helped,
        clean.gpu,
        clean.torch,
        clean.comment,
        caller.id,
        actor=caller.id,
        request_id=request.state.id,
    )
    return clean


@router.get(
    "",
    operation_id="listFeedback",
    summary="Read how often entries helped",
    response_model=FeedbackPage,
    responses=documented(422, 503),
)
def list_feedback(
    database: Kept,
    entry: Annotated[str, Query(max_length=100, pattern=SHOWN, description="Only of this entry.")] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many counts.")] = 100,
    cursor: Cursor = None,
) -> FeedbackPage:
    """One count for each entry and GPU, by entry; comments are not shown."""
    after = paging.position(LISTING, cursor) or ""
    found = sorted(feedback.counts(database, entry))
    shown, following = paging.page(LISTING, [one for one in found if _place(one) > after], limit, _place)
    counts = tuple(FeedbackCount(entry=one[0], gpu=one[1], helped=one[2], not_helped=one[3]) for one in shown)
    return FeedbackPage(feedback=counts, next=following)


def _place(count: tuple[str, str, int, int]) -> str:
    """In an order that is that of the tuples: no id or name has a line break."""
    return f"{count[0]}\n{count[1]}"
