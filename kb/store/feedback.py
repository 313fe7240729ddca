"""Feedback: whether entries helped, on which GPUs, and comments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import case, func, tuple_
from sqlmodel import col, select

from kb.store import audit
from kb.store.database import Database
from kb.store.tables import FeedbackRow, UtcTime, clamp_id, now


class FeedbackCount(NamedTuple):
    """How often an entry helped and did not help, on one kind of GPU ("" if unknown)."""

    entry_id: str
    gpu: str
    helped: int
    not_helped: int


@dataclass(frozen=True, slots=True)
class Comment:
    """A comment on an entry, with the rest of its feedback."""

    id: int
    entry_id: str
    helped: bool
    gpu: str
    torch: str
    comment: str
    received_at: UtcTime


def add(
    database: Database,
    entry_id: str,
    helped: bool,
    gpu: str,
    torch: str,
    comment: str,
    sender: str,
    request_id: str = "",
) -> None:
    """Store one feedback on an entry. `sender` is the id of an API key, or a name such as `anonymous`."""
    row = FeedbackRow(
        entry_id=entry_id, helped=helped, gpu=gpu, torch=torch, comment=comment, sender=sender, received_at=now()
    )
    with database.writing() as session:
        session.add(row)
        audit.add(session, sender, "feedback.create", f"entries/{entry_id}", request_id)


def counts(
    database: Database, entry_id: str = "", *, after: tuple[str, str] = ("", ""), limit: int | None = None
) -> list[FeedbackCount]:
    """The counts of one entry or of all, by entry and GPU; for the next page, `after` is the last group of this one."""
    group = (FeedbackRow.entry_id, FeedbackRow.gpu)
    helped = func.sum(case((col(FeedbackRow.helped), 1), else_=0))
    query = select(*group, helped, func.count() - helped).group_by(*group).order_by(*group).limit(limit)
    if entry_id:
        query = query.where(FeedbackRow.entry_id == entry_id)
    if any(after):
        query = query.where(tuple_(*group) > tuple_(*after))
    with database.reading() as session:
        return [FeedbackCount(*row) for row in session.exec(query)] if session else []


def comments(database: Database, limit: int = 50, before: int | None = None) -> list[Comment]:
    """The comments, newest first; for the next page, `before` is the last id of this one."""
    newest = select(FeedbackRow).where(FeedbackRow.comment != "").order_by(col(FeedbackRow.id).desc()).limit(limit)
    if before is not None:
        newest = newest.where(col(FeedbackRow.id) < clamp_id(before))
    with database.reading() as session:
        return [_comment(row) for row in session.exec(newest)] if session else []


def _comment(row: FeedbackRow) -> Comment:
    return Comment(row.id or 0, row.entry_id, row.helped, row.gpu, row.torch, row.comment, row.received_at)
