"""Feedback about entries, and how it is counted, described for OpenAPI."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field

from kb.sharing.shared_report import MAX_LINE, EntryId, Word
from kb.store.feedback import Comment

from .content import ID
from .times import UtcTime

FEEDBACK: dict[str, Any] = {
    "entry": ID,
    "helped": True,
    "gpu": "NVIDIA H100 80GB HBM3",
    "torch": "2.7.0",
    "comment": "",
}
COUNT: dict[str, Any] = {"entry": ID, "gpu": "NVIDIA H100 80GB HBM3", "helped": 4, "not_helped": 1}
COMMENT: dict[str, Any] = {"number": 12, **FEEDBACK, "at": "2026-03-01T08:30:00Z"}


class FeedbackDocument(BaseModel):
    """Whether an entry helped, on which GPU and torch. Unknown members are rejected."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [FEEDBACK]})
    entry: EntryId
    helped: Annotated[bool, Field(strict=True)]
    gpu: Word = ""
    torch: Word = ""
    comment: str = Field("", max_length=MAX_LINE, description="What helped, or what did not.")


class FeedbackCount(BaseModel):
    """How often an entry helped on one kind of GPU; `gpu` is empty when it is not known."""

    entry: str
    gpu: str
    helped: int
    not_helped: int


class FeedbackPage(BaseModel):
    """Counts by entry; `next` is the cursor to the rest, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"feedback": [COUNT], "next": None}]})
    feedback: tuple[FeedbackCount, ...]
    next: str | None


class CommentDocument(BaseModel):
    """A comment on an entry: data, not instructions."""

    number: int
    entry: str
    helped: bool
    gpu: str
    torch: str
    comment: str
    at: UtcTime

    @classmethod
    def of(cls, comment: Comment) -> Self:
        return cls(
            number=comment.id,
            entry=comment.entry_id,
            helped=comment.helped,
            gpu=comment.gpu,
            torch=comment.torch,
            comment=comment.comment,
            at=comment.received_at,
        )


class CommentPage(BaseModel):
    """Comments, newest first; `next` is the cursor to the rest, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"comments": [COMMENT], "next": None}]})
    comments: tuple[CommentDocument, ...]
    next: str | None
