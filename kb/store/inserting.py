"""INSERT ... ON CONFLICT, which SQLite and PostgreSQL spell alike and SQLAlchemy has apart."""

from __future__ import annotations

from typing import Any

from sqlalchemy.dialects import postgresql, sqlite
from sqlmodel import Session, SQLModel

Insert = sqlite.Insert | postgresql.Insert


def insert(session: Session, table: type[SQLModel], **values: Any) -> Insert:
    """An INSERT of one row, in the dialect of the session."""
    if session.get_bind().dialect.name == "postgresql":
        return postgresql.insert(table).values(**values)
    return sqlite.insert(table).values(**values)
