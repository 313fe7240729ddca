"""The audit log: one record for every write that a client of the service or `kb key` requested.

Actions: key.new, key.revoke, report.create, feedback.create, gap.forget, reindex.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlmodel import Session, col, select

from kb.store.database import Database
from kb.store.tables import AuditRow, UtcTime, clamp_id, now


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """One write. `actor` is the id of an API key or a name; `subject` is what was written, such as `reports/17`."""

    id: int
    at: UtcTime
    actor: str
    action: str
    subject: str
    request_id: str
    outcome: str


def add(session: Session, actor: str, action: str, subject: str, request_id: str = "") -> None:
    """Add a record in the transaction of the write. A write without an actor is kb's own and gets no record."""
    if actor:
        row = AuditRow(at=now(), actor=actor, action=action, subject=subject, request_id=request_id, outcome="ok")
        session.add(row)


def page(database: Database, limit: int = 50, before: int | None = None) -> list[AuditRecord]:
    """The latest records, newest first; for the next page, `before` is the last id of this one."""
    newest = select(AuditRow).order_by(col(AuditRow.id).desc()).limit(limit)
    if before is not None:
        newest = newest.where(col(AuditRow.id) < clamp_id(before))
    with database.reading() as session:
        return [_audit_record(row) for row in session.exec(newest)] if session else []


def _audit_record(row: AuditRow) -> AuditRecord:
    return AuditRecord(row.id or 0, row.at, row.actor, row.action, row.subject, row.request_id, row.outcome)
