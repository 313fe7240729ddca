"""POST and GET /v1/feedback: did an entry help, and on which kind of machine."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kb.sharing.shared_report import MAX_LINE, MAX_WORD, PRINTABLE, redact_gpu_name, redact_line
from kb.store import feedback

from ..requests import paging
from ..requests.access import Admin, Reader
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..schemas.feedback import CommentDocument, CommentPage, FeedbackCount, FeedbackDocument, FeedbackPage
from ..state.content import ServedContent, StoreDatabase

LISTING, COMMENTS = "feedback", "comments"

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
    request: Request, content: ServedContent, database: StoreDatabase, caller: Reader, given: FeedbackDocument
) -> FeedbackDocument:
    """Counted for the authors of the entry. What is written is kept as it is answered: without names and secrets."""
    entry = content.catalog.get(given.entry)
    clean = {
        "gpu": redact_gpu_name(given.gpu),
        "torch": redact_line(given.torch, MAX_WORD),
        "comment": redact_line(given.comment, MAX_LINE),
    }
    feedback.add(database, entry.id, given.helped, **clean, sender=caller.id, request_id=request.state.id)
    return given.model_copy(update=clean)


@router.get(
    "",
    operation_id="listFeedback",
    summary="Read how often entries helped",
    response_model=FeedbackPage,
    responses=documented(422, 503),
)
def list_feedback(
    database: StoreDatabase,
    entry: Annotated[str, Query(max_length=100, pattern=PRINTABLE, description="Only of this entry.")] = "",
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many counts.")] = 100,
    cursor: Cursor = None,
) -> FeedbackPage:
    """One count for each entry and GPU, by entry."""
    after = paging.position(LISTING, cursor) or ""
    found = sorted(feedback.counts(database, entry))
    shown, following = paging.page(LISTING, [one for one in found if _place(one) > after], limit, _place)
    counts = tuple(FeedbackCount(entry=one[0], gpu=one[1], helped=one[2], not_helped=one[3]) for one in shown)
    return FeedbackPage(feedback=counts, next=following)


@router.get(
    "/comments",
    operation_id="listComments",
    summary="Read what people say of entries",
    response_model=CommentPage,
    responses=documented(422, 503),
)
def list_comments(
    database: StoreDatabase,
    _: Admin,
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many comments.")] = 100,
    cursor: Cursor = None,
) -> CommentPage:
    """Newest first, for who cares for the entries: anybody who reads here can write one."""
    found = feedback.comments(database, limit + 1, paging.number(COMMENTS, cursor))
    shown, following = paging.page(COMMENTS, found, limit, lambda comment: comment.id)
    return CommentPage(comments=tuple(map(CommentDocument.of, shown)), next=following)


def _place(count: tuple[str, str, int, int]) -> str:
    """In an order that is that of the tuples: no id or name has a line break."""
    return f"{count[0]}\n{count[1]}"
