"""POST and GET /v1/feedback: whether an entry helped, and on which GPU."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request

from kb.sharing.hardware_names import gpu_name, version
from kb.sharing.shared_report import MAX_LINE, PRINTABLE, redact_line
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
    request: Request, content: ServedContent, database: StoreDatabase, caller: Reader, document: FeedbackDocument
) -> FeedbackDocument:
    """Feedback is counted for the authors of the entry. The response is what is stored, without names and secrets."""
    entry = content.catalog.get(document.entry)
    clean = {
        "gpu": gpu_name(document.gpu),
        "torch": version(document.torch),
        "comment": redact_line(document.comment, MAX_LINE),
    }
    feedback.add(database, entry.id, document.helped, **clean, sender=caller.id, request_id=request.state.id)
    return document.model_copy(update=clean)


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
    counts = feedback.counts(database, entry, after=after.partition("\n")[::2], limit=limit + 1)
    counts, following = paging.page(LISTING, counts, limit, _position)
    return FeedbackPage(feedback=tuple(map(_count_document, counts)), next=following)


@router.get(
    "/comments",
    operation_id="listComments",
    summary="Read comments on entries",
    response_model=CommentPage,
    responses=documented(422, 503),
)
def list_comments(
    database: StoreDatabase,
    _: Admin,
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many comments.")] = 100,
    cursor: Cursor = None,
) -> CommentPage:
    """Comments for authors of entries, newest first. Any reader can write a comment."""
    comments = feedback.comments(database, limit + 1, paging.number(COMMENTS, cursor))
    comments, following = paging.page(COMMENTS, comments, limit, lambda comment: comment.id)
    return CommentPage(comments=tuple(map(CommentDocument.of, comments)), next=following)


def _count_document(count: feedback.FeedbackCount) -> FeedbackCount:
    return FeedbackCount(entry=count.entry_id, gpu=count.gpu, helped=count.helped, not_helped=count.not_helped)


def _position(count: feedback.FeedbackCount) -> str:
    """The position of a count in the list. The line break is unambiguous, since no id or name contains one."""
    return f"{count.entry_id}\n{count.gpu}"
