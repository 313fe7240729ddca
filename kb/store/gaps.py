"""Gaps: questions without a good answer, counted so that authors see what is missing. Callers redact the texts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, func, or_
from sqlmodel import Session, col, select

from kb.errors import UsageError
from kb.store import audit
from kb.store.database import Database
from kb.store.tables import GapRow, UtcTime, now
from kb.store.upsert import insert

MAX_GAPS = 10_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A question of one kind (`search`, `diagnose`), with its frequency; `best` is the id of the nearest entry."""

    digest: str
    kind: str
    text: str
    count: int
    first: UtcTime
    last: UtcTime
    best: str


def digest(kind: str, text: str) -> str:
    """The identity of a gap."""
    return sha256(f"{kind}\n{text}".encode(errors="replace")).hexdigest()


def add(database: Database, questions: Iterable[tuple[str, str, str]]) -> None:
    """Count questions (kind, text, best). If there are more than `MAX_GAPS`, the rarest and oldest are deleted."""
    counts = Counter((digest(kind, text), kind, text, best) for kind, text, best in questions)
    if not counts:
        return
    with database.writing() as session:
        for question in sorted(counts):  # in a fixed order, so that two processes cannot deadlock
            _count(session, *question, times=counts[question])
        _delete_excess(session)


def page(database: Database, limit: int = 50, after: str | None = None) -> list[Gap]:
    """The most frequent gaps, then the latest; for the next page, `after` is the last digest of this one.

    Raises `UsageError` if no gap has that digest (any more).
    """
    with database.reading() as session:
        if session is None:
            return []
        query = select(GapRow).order_by(*_most_frequent()).limit(limit)
        if after is not None:
            query = query.where(_comes_after(_row(session, after)))
        return [_gap(row) for row in session.exec(query)]


def forget(database: Database, name: str, *, actor: str = "", request_id: str = "") -> None:
    """Delete the closed gap with this digest. Raises `UsageError` if there is none."""
    with database.writing() as session:
        session.delete(_row(session, name))
        audit.add(session, actor, "gap.forget", f"gaps/{name}", request_id)


def _count(session: Session, name: str, kind: str, text: str, best: str, *, times: int) -> None:
    at = now()
    row = insert(session, GapRow, digest=name, kind=kind, text=text, best=best, count=times, first_at=at, last_at=at)
    update = {"count": GapRow.count + times, "best": best, "last_at": at}
    session.execute(row.on_conflict_do_update(index_elements=["digest"], set_=update))


def _delete_excess(session: Session) -> None:
    excess = session.exec(select(func.count()).select_from(GapRow)).one() - MAX_GAPS
    if excess > 0:
        rarest = select(GapRow.digest).order_by(col(GapRow.count), col(GapRow.last_at), col(GapRow.digest).desc())
        session.execute(delete(GapRow).where(col(GapRow.digest).in_(rarest.limit(excess))))


def _most_frequent() -> tuple[Any, ...]:
    return col(GapRow.count).desc(), col(GapRow.last_at).desc(), col(GapRow.digest)


def _comes_after(row: GapRow) -> ColumnElement[bool]:
    count, last, name = col(GapRow.count), col(GapRow.last_at), col(GapRow.digest)
    is_older = or_(last < row.last_at, and_(last == row.last_at, name > row.digest))
    return or_(count < row.count, and_(count == row.count, is_older))


def _row(session: Session, name: str) -> GapRow:
    row = session.get(GapRow, name)
    if row is None:
        raise UsageError(f"no gap has the digest {name!r}", "GET /v1/gaps lists them from the beginning")
    return row


def _gap(row: GapRow) -> Gap:
    return Gap(row.digest, row.kind, row.text, row.count, row.first_at, row.last_at, row.best)
