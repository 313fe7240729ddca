"""A store of an earlier kb is taken over whole, whatever interrupts it, and one of a later kb is left alone."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlmodel import Session, SQLModel

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import AddedReport, add_shared, history, page, save, verdict_counts
from kb.store.schema import MIGRATIONS, SCHEMA, TABLE, revision, upgrade
from tests.support.console import GENEROUS_S
from tests.support.postgres_server import Server

pytest_plugins = ["tests.support.postgres_fixtures"]

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
KILLED = """
import json, os, signal, sys, tempfile
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlmodel import Session
from kb.store.database import Database

def prepare(left):
    def count(connection, cursor, statement, *_):
        nonlocal left
        is_read = statement.lower().startswith(("select", "show")) or "PRAGMA" in statement and "=" not in statement
        left -= not is_read  # a kill after it leaves the same as a kill before it
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(Engine, "after_cursor_execute", count)
    Database.open(sys.argv[1]).prepare()
    os._exit(0)

def schema():
    with Database.open(sys.argv[1]) as database, Session(database.backend.engine) as session:
        return database.backend.begin(session.connection(), is_writing=False) if database.backend.exists() else 0

with tempfile.TemporaryDirectory() as directory:
    Database.open(directory + "/any.db").prepare()  # imports and compiles what each child would
status, schemas = -1, []
while status:
    schemas.append(schema())
    child = os.fork() or prepare(len(schemas))
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
print(json.dumps(schemas))
"""
PREPARE = """
import multiprocessing, sys, tempfile
from kb.store.database import Database

def prepare():
    together.wait()
    Database.open(sys.argv[1]).prepare()

with tempfile.TemporaryDirectory() as directory:
    Database.open(directory + "/any.db").prepare()  # imports and compiles what each process would
fork = multiprocessing.get_context("fork")
together = fork.Barrier(4)
processes = [fork.Process(target=prepare) for _ in range(4)]
for process in processes:
    process.start()
for process in processes:
    process.join()
print([process.exitcode for process in processes])
"""
FULL = """
import resource, sys
from kb.errors import StoreUnavailable
from kb.store.database import Database

resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, 24 << 10))
try:
    Database.open(sys.argv[1]).prepare()
except StoreUnavailable as error:
    print(error.message, error.hint)
"""
QUIET = """
import sys
from kb.store.database import Database
from kb.store.reports import history, save

with Database.open(sys.argv[1]) as database:
    save(database, [])
    assert len(history(database)) == 3
sys.exit("alembic" in sys.modules)
"""


def report(entry_id: str) -> dict[str, Any]:
    words = dict.fromkeys(("verdict", "fidelity", "entry_digest", "probe_digest", "kb_version"), "x")
    return {"id": entry_id, **words, "started_at": "2026-03-01T00:00:00+00:00", "duration_s": 1.5}


def make_first(path: Path) -> Path:
    """A store as the first kb left it, with three reports."""
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


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return make_first(tmp_path / "kb" / "reports.db")


@pytest.fixture(params=["sqlite, empty", "sqlite, first", "postgresql, empty"])
def earlier(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a store that is to be migrated."""
    if request.param == "postgresql, empty":
        url: str = request.getfixturevalue("empty_postgres_url")
        return url
    path = tmp_path / "kb" / "reports.db"
    return f"sqlite:///{make_first(path) if request.param == 'sqlite, first' else path}"


@pytest.fixture(params=["sqlite", "postgresql"])
def second(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """A store with schema 2 and three reports of a node, whose `gpu_count` is 8."""
    is_file = request.param == "sqlite"
    with Database.open(tmp_path / "reports.db" if is_file else request.getfixturevalue("empty_postgres_url")) as opened:
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
        yield opened


def schema(database: Database) -> int:
    """The number of the schema, found without migrating."""
    with Session(database.backend.engine) as session:
        return database.backend.begin(session.connection(), is_writing=False)


def differences(database: Database) -> list[Any]:
    """What a migration would still have to do, in the eyes of Alembic."""
    with database.writing() as session:
        context = MigrationContext.configure(session.connection(), opts={"version_table": TABLE})
        return list(compare_metadata(context, SQLModel.metadata))


def run(script: str, *arguments: str | Path) -> str:
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_newest_migration_has_the_number_of_the_schema() -> None:
    assert ScriptDirectory(str(Path(sqlite.__file__).with_name("migrations"))).get_heads() == [revision(SCHEMA)]
    assert MIGRATIONS == "kb.store:migrations"


def test_migrations_lead_to_the_tables_that_the_code_has(earlier: str) -> None:
    with Database.open(earlier) as opened:
        assert differences(opened) == []
        assert schema(opened) == SCHEMA


def test_a_store_of_the_first_kb_is_taken_over_with_its_reports(first: Path) -> None:
    with Database.open(first) as opened:
        save(opened, [report("d")])
        assert [item["id"] for item in history(opened)] == ["d", "c", "b", "a"]
        assert history(opened, "a") == [report("a")]


def test_a_store_of_the_second_schema_loses_a_column_and_no_report(second: Database) -> None:
    assert schema(second) == 2
    reports = page(second)
    assert [report.document["id"] for report in reports] == ["c", "b", "a"]
    assert differences(second) == []
    assert [(row.entry_id, row.gpu, row.count) for row in verdict_counts(second)] == [(n, "H100", 1) for n in "abc"]
    again = add_shared(second, report("c"), "node", "c", "digest")
    assert again == AddedReport(reports[0].id, is_new=False)
    assert add_shared(second, report("d"), "node", "d", "digest").id > again.id


def test_looking_at_a_store_of_the_first_kb_takes_it_over_too(first: Path) -> None:
    with Database.open(first) as opened:
        assert [item["id"] for item in history(opened)] == ["c", "b", "a"]
        assert schema(opened) == SCHEMA


def test_alembic_is_loaded_only_when_a_migration_is_due(first: Path) -> None:
    Database.open(first).prepare()
    run(QUIET, first)


def test_a_migration_that_is_killed_after_any_write_leaves_the_earlier_schema(earlier: str) -> None:
    with Database.open(earlier) as opened:
        before = schema(opened) if opened.backend.exists() else 0
        schemas = json.loads(run(KILLED, earlier))  # before each attempt, which is killed one write later
        assert schemas.count(before) > 10
        assert schemas == sorted(schemas)
        assert set(schemas) <= {before, SCHEMA}
        assert differences(opened) == []
        assert len(history(opened)) == (3 if before else 0)


def test_processes_that_find_an_earlier_schema_at_once_migrate_it_once(earlier: str) -> None:
    assert json.loads(run(PREPARE, earlier)) == [0] * 4
    with Database.open(earlier) as opened:
        assert differences(opened) == []


def test_a_disk_that_fills_up_during_a_migration_leaves_the_earlier_schema(first: Path) -> None:
    result = run(FULL, first)
    assert "cannot be written" in result
    assert "space" in result
    with Database.open(first) as opened:
        assert schema(opened) == 1
        assert [item["id"] for item in history(opened)] == ["c", "b", "a"]


def test_a_server_that_dies_during_a_migration_leaves_the_earlier_schema(
    postgres: Server, empty_postgres_url: str
) -> None:
    statements = iter(range(12))
    with Database.open(empty_postgres_url) as opened:

        def kill(*_: object) -> None:
            if next(statements, -1) == 11:
                postgres.kill()

        event.listen(opened.backend.engine, "after_cursor_execute", kill)
        with pytest.raises(StoreUnavailable, match="cannot be written"):
            opened.prepare()
        postgres.start()
        assert schema(opened) == 0
        opened.prepare()
        assert differences(opened) == []


def test_a_newer_schema_on_a_server_is_refused_and_left_alone(postgres_url: str) -> None:
    with Database.open(postgres_url) as opened:
        with opened.writing() as session:
            session.connection().exec_driver_sql(f"UPDATE {TABLE} SET version_num='{revision(SCHEMA + 1)}'")
        for use in (lambda: save(opened, [report("a")]), lambda: history(opened), opened.prepare):
            with pytest.raises(StoreUnavailable, match=f"its schema is {SCHEMA + 1}, this one knows {SCHEMA}"):
                use()
        with Session(opened.backend.engine) as session:
            assert session.connection().exec_driver_sql("SELECT count(*) FROM report").scalar() == 0


def test_a_database_of_another_program_on_a_server_gets_no_tables_of_ours(empty_postgres_url: str) -> None:
    with Database.open(empty_postgres_url) as opened:
        with opened.backend.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE report (mine int)")
        with pytest.raises(StoreUnavailable, match="already exists") as caught:
            save(opened, [report("a")])
        assert "database of its own" in caught.value.hint
        assert schema(opened) == 0
