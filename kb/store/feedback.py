"""Did an entry help, and on which machines?"""

from __future__ import annotations

from typing import NamedTuple

from sqlalchemy import case, func
from sqlmodel import col, select

from kb.store import audit
from kb.store.database import Database
from kb.store.tables import FeedbackRow, now


class Count(NamedTuple):
    """How many people an entry helped and did not help, on one kind of GPU ("" when they did not say)."""

    entry_id: str
    gpu: str
    helped: int
    not_helped: int


def add(
    database: Database,
    entry_id: str,
    helped: bool,
    gpu: str,
    torch: str,
    comment: str,
    sender: str,
    *,
    actor: str = "",
    request_id: str = "",
) -> None:
    """Keep what one person says about an entry."""
    row = FeedbackRow(
        entry_id=entry_id, helped=helped, gpu=gpu, torch=torch, comment=comment, sender=sender, received_at=now()
    )
    with database.writing() as session:
        session.add(row)
        audit.add(session, actor, "feedback.create", f"entries/{entry_id}", request_id)


def counts(database: Database, entry_id: str = "") -> list[Count]:
    """Of one entry or of all, by entry and GPU."""
    group = (FeedbackRow.entry_id, FeedbackRow.gpu)
    helped = func.sum(case((col(FeedbackRow.helped), 1), else_=0))
    asked = select(*group, helped, func.count() - helped).group_by(*group).order_by(*group)
    if entry_id:
        asked = asked.where(FeedbackRow.entry_id == entry_id)
    with database.reading() as session:
        return [Count(*row) for row in session.exec(asked)] if session else []
