"""The tables of the store. Times are in UTC without an offset: SQLite keeps none."""

from __future__ import annotations

import datetime
from typing import Any

from sqlalchemy import JSON, Column, DateTime
from sqlmodel import Field, SQLModel


class StoredReport(SQLModel, table=True):
    """One report. The columns serve questions; `document` is the report as `kb verify --json` printed it."""

    __tablename__ = "report"

    id: int | None = Field(default=None, primary_key=True)
    entry_id: str = Field(index=True)
    verdict: str
    fidelity: str
    started_at: datetime.datetime = Field(sa_column=Column(DateTime, nullable=False))
    duration_s: float
    entry_digest: str
    probe_digest: str
    kb_version: str
    document: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))
