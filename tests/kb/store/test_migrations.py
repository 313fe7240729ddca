"""A store of an earlier kb is taken over whole, whatever interrupts it, and one of a later kb is left alone."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event
from sqlmodel import Session, SQLModel

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import history, save
from kb.store.schema import MIGRATIONS, SCHEMA, TABLE, revision
from tests.support.console import GENEROUS_S, end
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
KILLED = """
import json, os, signal, sys
from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlmodel import Session
from kb.store.database import Database

def prepare(left):
    def count(*_):
        nonlocal left
        left -= 1
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)
    event.listen(Engine, "after_cursor_execute", count)
    Database.open(sys.argv[1]).prepare()
    os._exit(0)

def schema():
    with Database.open(sys.argv[1]) as database, Session(database.place.engine) as session:
        return database.place.begin(session.connection(), is_writing=False) if database.place.exists() else 0

import alembic.command
status, found = -1, []
while status:
    found.append(schema())
    child = os.fork() or prepare(len(found))
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
print(json.dumps(found))
"""
PREPARE = """
import sys
from kb.store.database import Database

print("ready", flush=True)
sys.stdin.readline()
Database.open(sys.argv[1]).prepare()
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
    connection.execute(f"PRAGMA application_id={sqlite.APPLICATION}")
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


def schema(database: Database) -> int:
    """The number of the schema, found without migrating."""
    with Session(database.place.engine) as session:
        return database.place.begin(session.connection(), is_writing=False)


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
        assert [one["id"] for one in history(opened)] == ["d", "c", "b", "a"]
        assert history(opened, "a") == [report("a")]


def test_looking_at_a_store_of_the_first_kb_takes_it_over_too(first: Path) -> None:
    with Database.open(first) as opened:
        assert [one["id"] for one in history(opened)] == ["c", "b", "a"]
        assert schema(opened) == SCHEMA


def test_alembic_is_loaded_only_when_a_migration_is_due(first: Path) -> None:
    Database.open(first).prepare()
    run(QUIET, first)


def test_a_migration_that_is_killed_after_any_statement_leaves_the_earlier_schema(earlier: str) -> None:
    with Database.open(earlier) as opened:
        before = schema(opened) if opened.place.exists() else 0
        found = json.loads(run(KILLED, earlier))  # the schema before each attempt, one statement later every time
        assert found.count(before) > 10
        assert found == sorted(found)
        assert set(found) <= {before, SCHEMA}
        assert differences(opened) == []
        assert len(history(opened)) == (3 if before else 0)


def test_processes_that_find_an_earlier_schema_at_once_migrate_it_once(earlier: str) -> None:
    command = [sys.executable, "-c", PREPARE, earlier]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(4)]
    try:
        for one in started:
            assert one.stdout
            assert one.stdout.readline() == b"ready\n"
        for one in started:
            one.communicate(b"\n", timeout=GENEROUS_S)
        assert [one.returncode for one in started] == [0] * 4
    finally:
        for one in started:
            end(one)
    with Database.open(earlier) as opened:
        assert differences(opened) == []


def test_a_disk_that_fills_up_during_a_migration_leaves_the_earlier_schema(first: Path) -> None:
    told = run(FULL, first)
    assert "cannot be written" in told
    assert "space" in told
    with Database.open(first) as opened:
        assert schema(opened) == 1
        assert [one["id"] for one in history(opened)] == ["c", "b", "a"]


def test_a_server_that_dies_during_a_migration_leaves_the_earlier_schema(
    postgres: Server, empty_postgres_url: str
) -> None:
    statements = iter(range(12))
    with Database.open(empty_postgres_url) as opened:

        def kill(*_: object) -> None:
            if next(statements, -1) == 11:
                postgres.kill()

        event.listen(opened.place.engine, "after_cursor_execute", kill)
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
        for use in (lambda: save(opened, [report("a")]), lambda: history(opened), opened.prepare, opened.ping):
            with pytest.raises(StoreUnavailable, match=f"its schema is {SCHEMA + 1}, this one knows {SCHEMA}"):
                use()
        with Session(opened.place.engine) as session:
            assert session.connection().exec_driver_sql("SELECT count(*) FROM report").scalar() == 0


def test_a_database_of_another_program_on_a_server_gets_no_tables_of_ours(empty_postgres_url: str) -> None:
    with Database.open(empty_postgres_url) as opened:
        with opened.place.engine.begin() as connection:
            connection.exec_driver_sql("CREATE TABLE report (mine int)")
        with pytest.raises(StoreUnavailable, match="already exists") as caught:
            save(opened, [report("a")])
        assert "database of its own" in caught.value.hint
        assert schema(opened) == 0
