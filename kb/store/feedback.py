"""Did an entry help, on which machines, and what do people say of it?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from sqlalchemy import case, func
from sqlmodel import col, select

from kb.store import audit
from kb.store.database import Database
from kb.store.tables import FeedbackRow, Moment, bounded, now


class Count(NamedTuple):
    """How many people an entry helped and did not help, on one kind of GPU ("" when they did not say)."""

    entry_id: str
    gpu: str
    helped: int
    not_helped: int


@dataclass(frozen=True, slots=True)
class Comment:
    """What one person wrote about an entry."""

    id: int
    entry_id: str
    helped: bool
    gpu: str
    torch: str
    comment: str
    received_at: Moment


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
    """Keep what one person says about an entry. `sender` is the id of a key, or who else it was."""
    row = FeedbackRow(
        entry_id=entry_id, helped=helped, gpu=gpu, torch=torch, comment=comment, sender=sender, received_at=now()
    )
    with database.writing() as session:
        session.add(row)
        audit.add(session, sender, "feedback.create", f"entries/{entry_id}", request_id)


def counts(database: Database, entry_id: str = "") -> list[Count]:
    """Of one entry or of all, by entry and GPU."""
    group = (FeedbackRow.entry_id, FeedbackRow.gpu)
    helped = func.sum(case((col(FeedbackRow.helped), 1), else_=0))
    asked = select(*group, helped, func.count() - helped).group_by(*group).order_by(*group)
    if entry_id:
        asked = asked.where(FeedbackRow.entry_id == entry_id)
    with database.reading() as session:
        return [Count(*row) for row in session.exec(asked)] if session else []


def comments(database: Database, limit: int = 50, before: int | None = None) -> list[Comment]:
    """Newest first; after a page, `before` is the last id of it."""
    newest = select(FeedbackRow).where(FeedbackRow.comment != "").order_by(col(FeedbackRow.id).desc()).limit(limit)
    if before is not None:
        newest = newest.where(col(FeedbackRow.id) < bounded(before))
    with database.reading() as session:
        return [_comment(row) for row in session.exec(newest)] if session else []


def _comment(row: FeedbackRow) -> Comment:
    return Comment(row.id or 0, row.entry_id, row.helped, row.gpu, row.torch, row.comment, row.received_at)
