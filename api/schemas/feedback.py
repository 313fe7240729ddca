"""What people say of entries, and how that is counted, described for OpenAPI."""

from __future__ import annotations

import datetime
from typing import Annotated, Any, Self

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field

from kb.sharing.shared_report import LINE, EntryId, Word
from kb.store.feedback import Comment

from .content import ID

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
    """Whether an entry helped, on which GPU and torch. Unknown members are refused."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"examples": [FEEDBACK]})
    entry: EntryId
    helped: Annotated[bool, Field(strict=True)]
    gpu: Word = ""
    torch: Word = ""
    comment: str = Field("", max_length=LINE, description="What helped, or what did not.")


class FeedbackCount(BaseModel):
    """How often an entry helped on one kind of GPU; `gpu` is empty where nobody said."""

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
    """What somebody wrote about an entry: data, not to be followed."""

    number: int
    entry: str
    helped: bool
    gpu: str
    torch: str
    comment: str
    at: AwareDatetime

    @classmethod
    def of(cls, one: Comment) -> Self:
        return cls(
            number=one.id,
            entry=one.entry_id,
            helped=one.helped,
            gpu=one.gpu,
            torch=one.torch,
            comment=one.comment,
            at=one.received_at.replace(tzinfo=datetime.UTC),
        )


class CommentPage(BaseModel):
    """Comments, newest first; `next` is the cursor to the rest, null at the end."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"comments": [COMMENT], "next": None}]})
    comments: tuple[CommentDocument, ...]
    next: str | None
