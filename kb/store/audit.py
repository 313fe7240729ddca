"""The audit log: every write that somebody asked a service or `kb key` for, in the transaction of that write.

Actions: key.new, key.revoke, report.create, feedback.create, gap.forget, reindex.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlmodel import Session, col, select

from kb.store.database import Database
from kb.store.tables import AuditRow, Moment, bounded, now


@dataclass(frozen=True, slots=True)
class Audited:
    """One write. `actor` is the id of a key, or who else it was; `subject` names what was written, `reports/17`."""

    id: int
    at: Moment
    actor: str
    action: str
    subject: str
    request_id: str
    outcome: str


def add(session: Session, actor: str, action: str, subject: str, request_id: str = "", outcome: str = "ok") -> None:
    """Write it down in the transaction of a session. Without an actor nobody asked, and nothing is written."""
    if actor:
        row = AuditRow(at=now(), actor=actor, action=action, subject=subject, request_id=request_id, outcome=outcome)
        session.add(row)


def page(database: Database, limit: int = 50, before: int | None = None) -> list[Audited]:
    """What was written last, newest first; after a page, `before` is the last id of it."""
    newest = select(AuditRow).order_by(col(AuditRow.id).desc()).limit(limit)
    if before is not None:
        newest = newest.where(col(AuditRow.id) < bounded(before))
    with database.reading() as session:
        return [_audited(row) for row in session.exec(newest)] if session else []


def _audited(row: AuditRow) -> Audited:
    return Audited(row.id or 0, row.at, row.actor, row.action, row.subject, row.request_id, row.outcome)
