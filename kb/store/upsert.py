"""INSERT ... ON CONFLICT: the same syntax in SQLite and PostgreSQL, but two classes in SQLAlchemy."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from sqlalchemy import func, select
from sqlalchemy.dialects import sqlite
from sqlmodel import Session, SQLModel

if TYPE_CHECKING:
    from sqlalchemy.dialects import postgresql

LOCK = 0x6B627273  # the first key of the advisory locks of `serialize`


def serialize(session: Session, name: str) -> None:
    """Make transactions with the same name run one after the other. In SQLite, all writing transactions do."""
    if session.get_bind().dialect.name == "postgresql":
        session.execute(select(func.pg_advisory_xact_lock(LOCK, _key(name))))


def _key(name: str) -> int:
    """A 32-bit key for any text, since PostgreSQL's own hash accepts neither NUL nor surrogates."""
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:4], signed=True)


def insert(session: Session, table: type[SQLModel], **values: Any) -> sqlite.Insert | postgresql.Insert:
    """An INSERT of one row, in the dialect of the session."""
    if session.get_bind().dialect.name == "sqlite":
        return sqlite.insert(table).values(**values)
    from sqlalchemy.dialects import postgresql  # takes 20 ms, and `kb history` does not need it

    return postgresql.insert(table).values(**values)
