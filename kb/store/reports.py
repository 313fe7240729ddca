"""Reports of verifications: those of this user, and those that others sent to a service."""

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
from kb.store.tables import KeyRow, Moment, ReportRow, bounded, now
from kb.store.upsert import insert

AS_THEY_ARE = ("verdict", "fidelity", "duration_s", "entry_digest", "probe_digest", "kb_version")


@dataclass(frozen=True, slots=True)
class Admitted:
    """The number of a shared report; `is_new` unless it had been sent before."""

    id: int
    is_new: bool


@dataclass(frozen=True, slots=True)
class Kept:
    """A shared report as it came, and when, in UTC."""

    id: int
    received_at: Moment
    document: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Standing:
    """How many shared reports said the same of an entry on the same kind of machine; `last` came last."""

    entry_id: str
    gpu: str
    driver: str
    torch: str
    verdict: str
    fidelity: str
    entry_digest: str
    count: int
    last: Moment


def save(database: Database, documents: Sequence[Mapping[str, Any]]) -> None:
    """Keep reports of this user (`Report.to_json()`): all of them, or on an error none. None at all proves it works."""
    rows = [ReportRow(**_columns(document)) for document in documents]
    with database.writing() as session:
        session.add_all(rows)


def history(database: Database, entry_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
    """The reports of this user that were made last, newest first, of one entry or of all."""
    newest = select(ReportRow).where(col(ReportRow.sender).is_(None)).limit(limit)
    newest = newest.order_by(col(ReportRow.started_at).desc(), col(ReportRow.id).desc())
    if entry_id is not None:
        newest = newest.where(ReportRow.entry_id == entry_id)
    with database.reading() as session:
        return [row.document for row in session.exec(newest)] if session else []


def compare_wording(documents: Sequence[dict[str, Any]], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """The reports, each with `earlier_wording`: was another wording of the entry judged than the current one?

    `digests` are those of the entries now, by id. None: the entry is not among them, nobody can tell.
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


def admit(
    database: Database,
    report: Mapping[str, Any],
    sender: str,
    key: str,
    digest: str,
    request_id: str = "",
) -> Admitted:
    """Keep a report (`SharedReport` as JSON) that a sender marked with an idempotency key, once however often it comes.

    `digest` is of what was sent. Raises `KeyReused` when the sender used the key for another digest. The same digest
    under the same key from another API key is the same report: a node that got no answer may come again with a new
    one. Who copies both gains nothing, since reports may be read by all; another digest is a report of its own, so
    that nobody can take a key away from others.
    """
    columns = {"sender": sender, "idempotency_key": key, "body_digest": digest, "received_at": now()}
    with database.writing() as session:
        if (before := _of_another_key(session, sender, key, digest)) is not None:
            return Admitted(before, False)
        row = insert(session, ReportRow, **_columns(report), **_machine(report), **columns)
        once = row.on_conflict_do_nothing(index_elements=["sender", "idempotency_key"])
        new_id = session.execute(once.returning(col(ReportRow.id))).scalar()
        if new_id is None:
            return _admitted_before(session, sender, key, digest)
        audit.add(session, sender, "report.create", f"reports/{new_id}", request_id)
        return Admitted(new_id, True)


def page(
    database: Database,
    *,
    entry: str = "",
    gpu: str = "",
    torch: str = "",
    verdict: str = "",
    limit: int = 20,
    before: int | None = None,
) -> list[Kept]:
    """Shared reports, the last to arrive first; after a page, `before` is the last id of it.

    `gpu` is a part of the GPU's name in any case, `torch` the beginning of a version: 2.7 finds 2.7.1 and not 2.70.
    """
    asked = select(ReportRow).where(_is_shared()).order_by(col(ReportRow.id).desc()).limit(limit)
    if entry:
        asked = asked.where(ReportRow.entry_id == entry)
    if verdict:
        asked = asked.where(ReportRow.verdict == verdict)
    if gpu:
        asked = asked.where(col(ReportRow.gpu).icontains(gpu, autoescape=True))
    if torch:
        asked = asked.where(_is_version(torch))
    if before is not None:
        asked = asked.where(col(ReportRow.id) < bounded(before))
    with database.reading() as session:
        return [_kept(row) for row in session.exec(asked)] if session else []


def count(database: Database) -> int:
    """How many shared reports there are."""
    with database.reading() as session:
        asked = select(func.count()).select_from(ReportRow).where(_is_shared())
        return session.exec(asked).one() if session else 0


def standing(database: Database) -> list[Standing]:
    """What all shared reports say, by entry, machine, verdict and wording."""
    names = ("entry_id", "gpu", "driver", "torch", "verdict", "fidelity", "entry_digest")
    group = [getattr(ReportRow, name) for name in names]
    asked = sqlalchemy.select(*group, func.count(), func.max(ReportRow.received_at)).where(_is_shared())
    with database.reading() as session:
        rows = session.execute(asked.group_by(*group).order_by(*group)) if session else ()
        return [Standing(*row) for row in rows]


def _is_shared() -> ColumnElement[bool]:
    return col(ReportRow.sender).is_not(None)


def _is_version(text: str) -> ColumnElement[bool]:
    version, torch = text.rstrip("."), col(ReportRow.torch)
    return or_(
        torch == version,
        *(torch.startswith(version + separator, autoescape=True) for separator in (".", "+")),
    )


def _admitted_before(session: Session, sender: str, key: str, digest: str) -> Admitted:
    row = session.exec(select(ReportRow).where(ReportRow.sender == sender, ReportRow.idempotency_key == key)).one()
    if row.body_digest != digest:
        hint = "send a new report under a new key; the first one is kept"
        raise KeyReused(f"the idempotency key {key!r} was used for another report", hint)
    return Admitted(row.id or 0, False)


def _of_another_key(session: Session, sender: str, key: str, digest: str) -> int | None:
    """The number of this report where another API key brought it. By each key: the index begins with the sender."""
    asked = select(ReportRow.id).where(
        col(ReportRow.sender).in_(select(KeyRow.id)),
        ReportRow.sender != sender,
        ReportRow.idempotency_key == key,
        ReportRow.body_digest == digest,
    )
    return session.exec(asked.order_by(col(ReportRow.id)).limit(1)).first()


def _columns(document: Mapping[str, Any]) -> dict[str, Any]:
    started = datetime.datetime.fromisoformat(document["started_at"]).astimezone(datetime.UTC)
    return {
        "entry_id": document["id"],
        "started_at": started.replace(tzinfo=None),
        "document": dict(document),
        **{name: document[name] for name in AS_THEY_ARE},
    }


def _machine(report: Mapping[str, Any]) -> dict[str, Any]:
    machine = report.get("machine") or {}
    gpus = machine.get("gpus") or [""]
    versions = {name: machine.get(name) or "" for name in ("driver", "torch")}
    return {"gpu": gpus[0], "gpu_count": len(machine.get("gpus") or ()), **versions}


def _kept(row: ReportRow) -> Kept:
    assert row.id is not None
    assert row.received_at is not None
    return Kept(row.id, row.received_at, row.document)
