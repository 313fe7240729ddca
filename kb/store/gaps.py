"""Gaps: questions without a good answer, counted, so that authors see what is missing. The texts come redacted."""

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
from kb.store.tables import GapRow, Moment, now
from kb.store.upsert import insert

MOST = 10_000


@dataclass(frozen=True, slots=True)
class Gap:
    """A question of a kind (`search`, `diagnose`), when and how often it came; `best` is the nearest entry."""

    digest: str
    kind: str
    text: str
    count: int
    first: Moment
    last: Moment
    best: str


def digest(kind: str, text: str) -> str:
    """What tells one gap from another."""
    return sha256(f"{kind}\n{text}".encode(errors="replace")).hexdigest()


def add(database: Database, questions: Iterable[tuple[str, str, str]]) -> None:
    """Count (kind, text, best). Beyond `MOST` gaps the rarest go, of those the oldest first."""
    named = Counter((digest(kind, text), kind, text, best) for kind, text, best in questions)
    if not named:
        return
    with database.writing() as session:
        for question in sorted(named):  # in one order, lest two processes wait for each other
            _count(session, *question, times=named[question])
        _make_room(session)


def page(database: Database, limit: int = 50, after: str | None = None) -> list[Gap]:
    """The most frequent gaps, of equals the latest; after a page, `after` is the last digest of it.

    Raises `UsageError` when no gap has that digest (any more).
    """
    with database.reading() as session:
        if session is None:
            return []
        asked = select(GapRow).order_by(*_most_frequent()).limit(limit)
        if after is not None:
            asked = asked.where(_comes_after(_row(session, after)))
        return [_gap(row) for row in session.exec(asked)]


def forget(database: Database, name: str, *, actor: str = "", request_id: str = "") -> None:
    """Delete the gap with this digest: it is closed. Raises `UsageError` when there is none."""
    with database.writing() as session:
        session.delete(_row(session, name))
        audit.add(session, actor, "gap.forget", f"gaps/{name}", request_id)


def _count(session: Session, name: str, kind: str, text: str, best: str, *, times: int) -> None:
    at = now()
    row = insert(session, GapRow, digest=name, kind=kind, text=text, best=best, count=times, first_at=at, last_at=at)
    again = {"count": GapRow.count + times, "best": best, "last_at": at}
    session.execute(row.on_conflict_do_update(index_elements=["digest"], set_=again))


def _make_room(session: Session) -> None:
    excess = session.exec(select(func.count()).select_from(GapRow)).one() - MOST
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
    found = session.get(GapRow, name)
    if found is None:
        raise UsageError(f"no gap has the digest {name!r}", "GET /v1/gaps lists them from the beginning")
    return found


def _gap(row: GapRow) -> Gap:
    return Gap(row.digest, row.kind, row.text, row.count, row.first_at, row.last_at, row.best)
