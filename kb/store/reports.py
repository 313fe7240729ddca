"""Reports of verifications, kept and asked for. Every function raises `StoreUnavailable` and nothing else."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from sqlmodel import col, select

from kb.store.database import Database
from kb.store.tables import StoredReport


def save(database: Database, documents: Sequence[Mapping[str, Any]]) -> None:
    """Keep reports (`Report.to_json()`): all of them, or on an error none. Saving nothing proves that it works."""
    rows = [_row(document) for document in documents]
    with database.writing() as session:
        session.add_all(rows)


def history(database: Database, entry_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
    """The newest reports, newest first, of one entry or of all; at most `limit`."""
    newest = select(StoredReport).order_by(col(StoredReport.started_at).desc(), col(StoredReport.id).desc())
    if entry_id is not None:
        newest = newest.where(StoredReport.entry_id == entry_id)
    with database.reading() as session:
        return [row.document for row in session.exec(newest.limit(limit))] if session else []


def compare_wording(documents: Sequence[dict[str, Any]], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """The reports, each with `earlier_wording`: was another wording of the entry judged than the current one?

    `digests` are those of the entries now, by id. None: the entry is not among them, nobody can tell.
    """
    return [
        {**one, "earlier_wording": one["entry_digest"] != digests[one["id"]] if one["id"] in digests else None}
        for one in documents
    ]


def _row(document: Mapping[str, Any]) -> StoredReport:
    started = datetime.datetime.fromisoformat(document["started_at"]).astimezone(datetime.UTC)
    return StoredReport(
        entry_id=document["id"],
        verdict=document["verdict"],
        fidelity=document["fidelity"],
        started_at=started.replace(tzinfo=None),
        duration_s=document["duration_s"],
        entry_digest=document["entry_digest"],
        probe_digest=document["probe_digest"],
        kb_version=document["kb_version"],
        document=dict(document),
    )
