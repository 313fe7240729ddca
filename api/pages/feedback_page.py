"""The feedback form of an entry."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Form, Request
from fastapi.responses import RedirectResponse
from pydantic import ValidationError

from kb.errors import UsageError

from ..requests.access import Reader
from ..routes.feedback import post_feedback
from ..schemas.feedback import FeedbackDocument
from ..state.content import ServedContent, StoreDatabase
from .page import address

router = APIRouter()


@router.post("/entries/{entry_id}/feedback")
def feedback_page(
    request: Request,
    content: ServedContent,
    database: StoreDatabase,
    caller: Reader,
    entry_id: str,
    helped: Annotated[Literal["yes", "no"], Form()],
    gpu: Annotated[str, Form()] = "",
    comment: Annotated[str, Form()] = "",
    lang: Annotated[str, Form()] = "",
) -> RedirectResponse:
    """Store feedback as POST /v1/feedback does, and return to the entry."""
    try:
        feedback = FeedbackDocument(entry=entry_id, helped=helped == "yes", gpu=gpu, comment=comment)
    except ValidationError as error:
        raise UsageError(f"{error.errors()[0]['loc'][-1]}: {error.errors()[0]['msg']}") from None
    post_feedback(request, content, database, caller, feedback)
    return RedirectResponse(address(f"/entries/{entry_id}", lang=lang, helped=helped) + "#feedback", 303)
