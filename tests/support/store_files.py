"""Reports to save, and access to the SQLite file that contains them."""

from __future__ import annotations

import datetime
import sqlite3
from pathlib import Path
from typing import Any

from kb.verify.report import Report
from kb.verify.verdict import Judgement, Verdict


def report(entry_id: str = "the-entry", minute: int = 0, verdict: Verdict = Verdict.VERIFIED) -> dict[str, Any]:
    started = datetime.datetime(2026, 3, 1, 8, minute, tzinfo=datetime.timezone(datetime.timedelta(hours=8)))
    made = Report(
        entry_id=entry_id,
        title="A title, 标题",
        judgement=Judgement(verdict, "because"),
        entry_digest="e" * 64,
        probe_digest="p" * 64,
        started_at=started,
        duration_s=1.5,
        environment={"torch": None, "host": "a'b\"; DROP TABLE report"},
    )
    return made.to_json()


def query(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()
