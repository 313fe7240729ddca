"""Reports, as `kb verify` stores them."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    op.create_table(
        "report",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("entry_id", sa.String, nullable=False),
        sa.Column("verdict", sa.String, nullable=False),
        sa.Column("fidelity", sa.String, nullable=False),
        sa.Column("started_at", sa.DateTime, nullable=False),
        sa.Column("duration_s", sa.Float, nullable=False),
        sa.Column("entry_digest", sa.String, nullable=False),
        sa.Column("probe_digest", sa.String, nullable=False),
        sa.Column("kb_version", sa.String, nullable=False),
        sa.Column("document", sa.JSON, nullable=False),
    )
    op.create_index("ix_report_entry_id", "report", ["entry_id"])
