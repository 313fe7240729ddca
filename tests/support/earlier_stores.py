"""Stores as earlier versions of kb left them, and how far a store is migrated."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlmodel import Session, SQLModel

from kb.store import sqlite
from kb.store.database import Database
from kb.store.schema import TABLE, upgrade
from tests.support.console import GENEROUS_S

FIRST = """
PRAGMA journal_mode=WAL;
CREATE TABLE report (
    id INTEGER NOT NULL, entry_id VARCHAR NOT NULL, verdict VARCHAR NOT NULL, fidelity VARCHAR NOT NULL,
    started_at DATETIME NOT NULL, duration_s FLOAT NOT NULL, entry_digest VARCHAR NOT NULL,
    probe_digest VARCHAR NOT NULL, kb_version VARCHAR NOT NULL, document JSON NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX ix_report_entry_id ON report (entry_id);
"""
SECOND_REPORT = """
INSERT INTO report (entry_id, verdict, fidelity, started_at, duration_s, entry_digest, probe_digest, kb_version,
    document, gpu, gpu_count, received_at, sender, idempotency_key, body_digest)
VALUES (:name, 'x', 'x', '2026-03-01 00:00:00.000000', 1.5, 'x', 'x', 'x',
    :document, 'H100', 8, '2026-03-02 00:00:00.000000', 'node', :name, 'digest')
"""


def report(entry_id: str) -> dict[str, Any]:
    words = dict.fromkeys(("verdict", "fidelity", "entry_digest", "probe_digest", "kb_version"), "x")
    return {"id": entry_id, **words, "started_at": "2026-03-01T00:00:00+00:00", "duration_s": 1.5}


def make_first(path: Path) -> Path:
    """A store as the first version of kb left it, with three reports."""
    path.parent.mkdir(parents=True)
    connection = sqlite3.connect(path)
    connection.executescript(FIRST)
    for name in "abc":
        row = (name, "x", "x", "2026-03-01 00:00:00.000000", 1.5, "x", "x", "x", json.dumps(report(name)))
        connection.execute(
            "INSERT INTO report (entry_id, verdict, fidelity, started_at, duration_s, entry_digest, probe_digest,"
            " kb_version, document) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            row,
        )
    connection.execute(f"PRAGMA application_id={sqlite.APPLICATION_ID}")
    connection.execute("PRAGMA user_version=1")
    connection.commit()
    connection.close()
    return path


def make_second(opened: Database) -> None:
    """A store with schema 2 and three reports of a node, whose `gpu_count` is 8."""
    opened.backend.prepare_storage()
    with Session(opened.backend.engine) as session:
        connection = session.connection()
        opened.backend.begin(connection, is_writing=True)
        upgrade(connection, 0, to=2)
        opened.backend.stamp(connection, 2)
        for name in "abc":
            row = {"name": name, "document": json.dumps(report(name))}
            connection.execute(sqlalchemy.text(SECOND_REPORT), row)
        session.commit()


def schema(database: Database) -> int:
    """The number of the schema, read without migrating."""
    with Session(database.backend.engine) as session:
        return database.backend.begin(session.connection(), is_writing=False)


def differences(database: Database) -> list[Any]:
    """What a migration would still have to do, according to Alembic."""
    with database.writing() as session:
        context = MigrationContext.configure(session.connection(), opts={"version_table": TABLE})
        return list(compare_metadata(context, SQLModel.metadata))


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout
