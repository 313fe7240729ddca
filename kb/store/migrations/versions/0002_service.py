"""What a service stores: reports of others, keys, feedback, gaps, the audit log, the generation of its content."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    _share_reports()
    op.create_table(
        "api_key",
        sa.Column("id", sa.String, primary_key=True),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("scope", sa.String, nullable=False),
        sa.Column("secret_hash", sa.String, nullable=False),
        sa.Column("created_at", sa.DateTime, nullable=False),
        sa.Column("revoked_at", sa.DateTime),
        sa.Column("last_used_at", sa.DateTime),
    )
    op.create_table(
        "feedback",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("entry_id", sa.String, nullable=False),
        sa.Column("helped", sa.Boolean, nullable=False),
        sa.Column("gpu", sa.String, nullable=False),
        sa.Column("torch", sa.String, nullable=False),
        sa.Column("comment", sa.String, nullable=False),
        sa.Column("sender", sa.String, nullable=False),
        sa.Column("received_at", sa.DateTime, nullable=False),
    )
    op.create_index("ix_feedback_entry_id", "feedback", ["entry_id"])
    op.create_table(
        "gap",
        sa.Column("digest", sa.String, primary_key=True),
        sa.Column("kind", sa.String, nullable=False),
        sa.Column("text", sa.String, nullable=False),
        sa.Column("best", sa.String, nullable=False),
        sa.Column("count", sa.Integer, nullable=False),
        sa.Column("first_at", sa.DateTime, nullable=False),
        sa.Column("last_at", sa.DateTime, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("at", sa.DateTime, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("subject", sa.String, nullable=False),
        sa.Column("request_id", sa.String, nullable=False),
        sa.Column("outcome", sa.String, nullable=False),
    )
    op.create_table(
        "state",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )


def _share_reports() -> None:
    """Add who sent a report and the machine that it ran on. Reports of this user have no sender."""
    for name in ("gpu", "driver", "torch"):
        op.add_column("report", sa.Column(name, sa.String, nullable=False, server_default=""))
    op.add_column("report", sa.Column("gpu_count", sa.Integer))
    op.add_column("report", sa.Column("received_at", sa.DateTime))
    for name in ("sender", "idempotency_key", "body_digest"):
        op.add_column("report", sa.Column(name, sa.String))
    op.create_index("ix_report_sender_key", "report", ["sender", "idempotency_key"], unique=True)
