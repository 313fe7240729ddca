"""Data for pages in tests and screenshots: reports of several kinds of machines, and gaps, at fixed times."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta
from typing import Any

from sqlmodel import col, select

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.store import gaps, reports
from kb.store.database import Database
from kb.store.tables import GapRow, ReportRow

ENTRY = "checkpoint-save-allgather-timeout"
QUESTION = "ALLGATHER timeout save"
DAY = datetime(2026, 11, 3, 9, 30)  # UTC, as in the store

VERDICTS: tuple[
    tuple[list[str], str | None, str, str, str, bool, int], ...
] = (  # GPUs, driver, torch, verdict, fidelity, whether the wording is current, count
    (["NVIDIA H100 (sample)"] * 2, "570.86.15", "2.7.1+cu128", "verified", "hardware", True, 12),
    (["NVIDIA H100 (sample)"] * 8, "550.54.15", "2.5.1+cu124", "verified", "hardware", True, 5),
    (["NVIDIA A100 (sample)"] * 4, "550.54.15", "2.6.0+cu124", "verified", "hardware", True, 7),
    (["NVIDIA A100 (sample)"] * 4, "535.104.05", "2.1.2+cu121", "fix-ineffective", "hardware", False, 1),
    (["NVIDIA L40S (sample)"], "560.35.03", "2.6.0+cu124", "not-applicable", "hardware", True, 3),
    ([], None, "2.7.1+cpu", "verified", "cpu", True, 4),
)
GAPS = (
    ("search", "pipeline parallel bubble too large on uneven stages", "collective-shape-mismatch", 14),
    ("search", "训练速度越来越慢 GPU 利用率掉到 30%", "slow-rank-exceeds-timeout", 9),
    ("diagnose", "RuntimeError: Triton Error [HIP]: Code: 98, Messsage: invalid device function", "", 6),
    ("search", "how do I resume a wandb run", "", 2),
)


def fill(database: Database) -> None:
    """Add all data to an empty database."""
    database.prepare()
    digest = load_catalog((builtin_root(),)).get(ENTRY).digest
    for number, verdict in enumerate(VERDICTS):
        for again in range(verdict[-1]):
            document = report(digest, *verdict[:-1])
            sent = hashlib.sha256(json.dumps(document).encode()).hexdigest()
            reports.add_shared(database, document, "sample", f"sample-{number}-{again}", sent)
    gaps.add(database, [(kind, text, best) for kind, text, best, count in GAPS for _ in range(count)])
    _set_times(database)


def report(
    digest: str, gpus: list[str], driver: str | None, torch: str, verdict: str, fidelity: str, is_current: bool
) -> dict[str, Any]:
    return {
        "id": ENTRY,
        "title": "All-gather times out while a sharded model is saved",
        "verdict": verdict,
        "reason": "",
        "fidelity": fidelity,
        "entry_digest": digest if is_current else "0" * 64,
        "probe_digest": "1" * 64,
        "started_at": f"{DAY.isoformat()}+00:00",
        "duration_s": 9.4,
        "kb_version": "0.1.0",
        "machine": {"gpus": gpus, "driver": driver, "torch": torch},
    }


def _set_times(database: Database) -> None:
    """Set fixed times, so that screenshots are the same every day."""
    with database.writing() as session:
        for number, report in enumerate(session.exec(select(ReportRow).order_by(col(ReportRow.id)))):
            report.received_at = DAY - timedelta(days=number)
        for number, gap in enumerate(session.exec(select(GapRow).order_by(col(GapRow.count).desc()))):
            gap.first_at, gap.last_at = DAY - timedelta(days=30 + number), DAY - timedelta(days=number)
