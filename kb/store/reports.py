"""Reports of verifications: the user's own, and shared ones that a service received."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy
from sqlalchemy import ColumnElement, func, or_
from sqlmodel import Session, col, select

from kb.errors import KeyReused
from kb.store import audit
from kb.store.database import Database
from kb.store.tables import KeyRow, ReportRow, UtcTime, clamp_id, now
from kb.store.upsert import insert, serialize

MAX_COUNTS = 100  # per entry; pages and searches of a service hold them in memory
COPIED_COLUMNS = ("verdict", "fidelity", "duration_s", "entry_digest", "probe_digest", "kb_version")


@dataclass(frozen=True, slots=True)
class AddedReport:
    """The id of a shared report; `is_new` is false if it had been sent before."""

    id: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class StoredReport:
    """A shared report as received, and when (UTC)."""

    id: int
    received_at: UtcTime
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class VerdictCount:
    """The shared reports with one verdict on one wording of an entry and one kind of machine; `last` is the newest."""

    entry_id: str
    gpu: str
    driver: str
    torch: str
    verdict: str
    fidelity: str
    entry_digest: str
    count: int
    last: UtcTime


def save(database: Database, documents: Sequence[Mapping[str, Any]]) -> None:
    """Store reports of this user (`Report.to_json()`), all or, on an error, none. An empty list tests the store."""
    rows = [ReportRow(**_columns(document)) for document in documents]
    with database.writing() as session:
        session.add_all(rows)


def history(database: Database, entry_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
    """The latest reports of this user on one entry or on all, newest first."""
    newest = select(ReportRow).where(col(ReportRow.sender).is_(None)).limit(limit)
    newest = newest.order_by(col(ReportRow.started_at).desc(), col(ReportRow.id).desc())
    if entry_id is not None:
        newest = newest.where(ReportRow.entry_id == entry_id)
    with database.reading() as session:
        return [row.document for row in session.exec(newest)] if session else []


def compare_wording(documents: Sequence[dict[str, Any]], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """The reports, each with `earlier_wording`: whether it is about a wording of the entry other than the current one.

    `digests` are the digests of the current entries, by id. `earlier_wording` is None if the entry is not among them.
    """
    return [
        {
            **document,
            "earlier_wording": document["entry_digest"] != digests[document["id"]]
            if document["id"] in digests
            else None,
        }
        for document in documents
    ]


def add_shared(
    database: Database,
    report: Mapping[str, Any],
    sender: str,
    key: str,
    digest: str,
    request_id: str = "",
) -> AddedReport:
    """Store a report (`SharedReport` as JSON) under its sender's idempotency key, once however often it is sent.

    `digest` is the digest of the request body. Raises `KeyReused` if the sender used the key for another digest. The
    same key and digest from another API key are the same report, since a node that got no answer may try again with a
    new API key; copying both gains nothing, since everybody may read reports. With another digest it is a new report,
    so that nobody can occupy the idempotency keys of others.
    """
    columns = {"sender": sender, "idempotency_key": key, "body_digest": digest, "received_at": now()}
    with database.writing() as session:
        serialize(session, f"{key}\n{digest}")  # two API keys may send it at once
        if (before := _id_under_another_key(session, sender, key, digest)) is not None:
            return AddedReport(before, False)
        row = insert(session, ReportRow, **_columns(report), **_machine(report), **columns)
        once = row.on_conflict_do_nothing(index_elements=["sender", "idempotency_key"])
        new_id = session.execute(once.returning(col(ReportRow.id))).scalar()
        if new_id is None:
            return _added_before(session, sender, key, digest)
        audit.add(session, sender, "report.create", f"reports/{new_id}", request_id)
        return AddedReport(new_id, True)


def page(
    database: Database,
    *,
    entry: str = "",
    gpu: str = "",
    torch: str = "",
    verdict: str = "",
    limit: int = 20,
    before: int | None = None,
) -> list[StoredReport]:
    """Shared reports, newest first; for the next page, `before` is the last id of this one.

    `gpu` is a part of the GPU name, ignoring case; `torch` is the beginning of a version: 2.7 selects 2.7.1, not 2.70.
    """
    query = select(ReportRow).where(_is_shared()).order_by(col(ReportRow.id).desc()).limit(limit)
    if entry:
        query = query.where(ReportRow.entry_id == entry)
    if verdict:
        query = query.where(ReportRow.verdict == verdict)
    if gpu:
        query = query.where(col(ReportRow.gpu).icontains(gpu, autoescape=True))
    if torch:
        query = query.where(_is_version(torch))
    if before is not None:
        query = query.where(col(ReportRow.id) < clamp_id(before))
    with database.reading() as session:
        return [_stored_report(row) for row in session.exec(query)] if session else []


def count(database: Database) -> int:
    """The number of shared reports."""
    with database.reading() as session:
        query = select(func.count()).select_from(ReportRow).where(_is_shared())
        return session.exec(query).one() if session else 0


def verdict_counts(database: Database) -> list[VerdictCount]:
    """The shared reports counted by entry, machine, verdict and wording: the highest `MAX_COUNTS` of each entry."""
    names = ("entry_id", "gpu", "driver", "torch", "verdict", "fidelity", "entry_digest")
    group = [getattr(ReportRow, name) for name in names]
    count, last = func.count(), func.max(ReportRow.received_at)
    place = func.row_number().over(partition_by=group[0], order_by=(count.desc(), last.desc(), *group))
    query = sqlalchemy.select(*group, count.label("count"), last.label("last"), place.label("place"))
    counted = query.where(_is_shared()).group_by(*group).subquery()
    highest = sqlalchemy.select(*(counted.c[name] for name in (*names, "count", "last")))
    highest = highest.where(counted.c.place <= MAX_COUNTS).order_by(*(counted.c[name] for name in names))
    with database.reading() as session:
        return [VerdictCount(*row) for row in session.execute(highest)] if session else []


def _is_shared() -> ColumnElement[bool]:
    return col(ReportRow.sender).is_not(None)


def _is_version(text: str) -> ColumnElement[bool]:
    version, torch = text.rstrip("."), col(ReportRow.torch)
    return or_(
        torch == version,
        *(torch.startswith(version + separator, autoescape=True) for separator in (".", "+")),
    )


def _added_before(session: Session, sender: str, key: str, digest: str) -> AddedReport:
    row = session.exec(select(ReportRow).where(ReportRow.sender == sender, ReportRow.idempotency_key == key)).one()
    if row.body_digest != digest:
        hint = "send a new report under a new key; the first one is stored"
        raise KeyReused(f"the idempotency key {key!r} was used for another report", hint)
    return AddedReport(row.id or 0, False)


def _id_under_another_key(session: Session, sender: str, key: str, digest: str) -> int | None:
    """The id of this report if another API key sent it. The query names senders, since the index begins with them."""
    query = select(ReportRow.id).where(
        col(ReportRow.sender).in_(select(KeyRow.id)),
        ReportRow.sender != sender,
        ReportRow.idempotency_key == key,
        ReportRow.body_digest == digest,
    )
    return session.exec(query.order_by(col(ReportRow.id)).limit(1)).first()


def _columns(document: Mapping[str, Any]) -> dict[str, Any]:
    started = datetime.datetime.fromisoformat(document["started_at"]).astimezone(datetime.UTC)
    return {
        "entry_id": document["id"],
        "started_at": started.replace(tzinfo=None),
        "document": dict(document),
        **{name: document[name] for name in COPIED_COLUMNS},
    }


def _machine(report: Mapping[str, Any]) -> dict[str, Any]:
    machine = report.get("machine") or {}
    gpus = machine.get("gpus") or [""]
    versions = {name: machine.get(name) or "" for name in ("driver", "torch")}
    return {"gpu": gpus[0], **versions}


def _stored_report(row: ReportRow) -> StoredReport:
    assert row.id is not None
    assert row.received_at is not None
    return StoredReport(row.id, row.received_at, row.document)
