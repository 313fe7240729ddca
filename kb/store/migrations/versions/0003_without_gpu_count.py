"""Drops the number of GPUs of a report, which nothing reads, since `document` has the name of each GPU."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    with op.batch_alter_table("report") as report:  # SQLite before 3.35 cannot drop a column
        report.drop_column("gpu_count")
