"""Alembic runs this in the connection and transaction of `kb.store.schema.upgrade`."""

from __future__ import annotations

from alembic import context
from sqlmodel import SQLModel

from kb.store import tables  # noqa: F401 - registers the tables
from kb.store.schema import TABLE

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=SQLModel.metadata,
    version_table=TABLE,
)
context.run_migrations()
