"""The tables of the store. Times are in UTC without an offset, which SQLite does not store."""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import JSON, DateTime, Dialect, Index, String, TypeDecorator
from sqlmodel import Field, SQLModel

UtcTime = datetime.datetime
MAX_INTEGER = 2**31 - 1  # largest INTEGER in PostgreSQL


def now() -> UtcTime:
    """The current time in the form that the tables use."""
    return datetime.datetime.now(datetime.UTC).replace(tzinfo=None)


def clamp_id(number: int) -> int:
    """The valid row id that is nearest to a number."""
    return max(0, min(number, MAX_INTEGER))


class Text(TypeDecorator[str]):
    """Any text. NUL and lone surrogates, which a database cannot store, become question marks."""

    impl = String
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:  # noqa: ARG002
        return None if value is None else value.encode(errors="replace").decode().replace("\0", "?")


class ReportRow(SQLModel, table=True):
    """One report. `document` is the whole report; the other columns are for queries.

    A report without a sender is the user's own, as `kb verify --json` printed it; a shared report has a sender.
    """

    __tablename__ = "report"
    __table_args__ = (Index("ix_report_sender_key", "sender", "idempotency_key", unique=True),)

    id: int | None = Field(default=None, primary_key=True)
    entry_id: str = Field(index=True, sa_type=Text)
    verdict: str = Field(sa_type=Text)
    fidelity: str = Field(sa_type=Text)
    started_at: UtcTime = Field(sa_type=DateTime)
    duration_s: float
    entry_digest: str = Field(sa_type=Text)
    probe_digest: str = Field(sa_type=Text)
    kb_version: str = Field(sa_type=Text)
    document: dict[str, Any] = Field(sa_type=JSON)
    gpu: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    driver: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    torch: str = Field(default="", sa_type=Text, sa_column_kwargs={"server_default": ""})
    received_at: UtcTime | None = Field(default=None, sa_type=DateTime)
    sender: str | None = Field(default=None, sa_type=Text)
    idempotency_key: str | None = Field(default=None, sa_type=Text)
    body_digest: str | None = Field(default=None, sa_type=Text)


class KeyRow(SQLModel, table=True):
    """An API key, without its secret."""

    __tablename__ = "api_key"

    id: str = Field(primary_key=True, sa_type=Text)
    name: str = Field(sa_type=Text)
    scope: str = Field(sa_type=Text)
    secret_hash: str = Field(sa_type=Text)
    created_at: UtcTime = Field(sa_type=DateTime)
    revoked_at: UtcTime | None = Field(default=None, sa_type=DateTime)
    last_used_at: UtcTime | None = Field(default=None, sa_type=DateTime)


class FeedbackRow(SQLModel, table=True):
    """Whether an entry helped, as one person reported."""

    __tablename__ = "feedback"

    id: int | None = Field(default=None, primary_key=True)
    entry_id: str = Field(index=True, sa_type=Text)
    helped: bool
    gpu: str = Field(sa_type=Text)
    torch: str = Field(sa_type=Text)
    comment: str = Field(sa_type=Text)
    sender: str = Field(sa_type=Text)
    received_at: UtcTime = Field(sa_type=DateTime)


class GapRow(SQLModel, table=True):
    """A question without a good answer, and how often it was asked."""

    __tablename__ = "gap"

    digest: str = Field(primary_key=True, sa_type=Text)
    kind: str = Field(sa_type=Text)
    text: str = Field(sa_type=Text)
    best: str = Field(sa_type=Text)
    count: int
    first_at: UtcTime = Field(sa_type=DateTime)
    last_at: UtcTime = Field(sa_type=DateTime)


class AuditRow(SQLModel, table=True):
    """One write: actor, action, subject, request. `outcome` is always `ok`; GET /v1/admin/audit returns it."""

    __tablename__ = "audit"

    id: int | None = Field(default=None, primary_key=True)
    at: UtcTime = Field(sa_type=DateTime)
    actor: str = Field(sa_type=Text)
    action: str = Field(sa_type=Text)
    subject: str = Field(sa_type=Text)
    request_id: str = Field(sa_type=Text)
    outcome: str = Field(sa_type=Text)


class StateRow(SQLModel, table=True):
    """A number shared by all processes of a service."""

    __tablename__ = "state"

    name: str = Field(primary_key=True, sa_type=Text)
    value: int
