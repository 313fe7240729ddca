"""A migration that is killed, crowded, out of disk or cut off leaves the earlier schema with its reports."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sqlalchemy import event

from kb.errors import StoreUnavailable
from kb.store.database import Database
from kb.store.reports import history
from kb.store.schema import SCHEMA
from tests.support.earlier_stores import differences, run, schema
from tests.support.postgres_server import Server

pytest_plugins = ["tests.support.postgres_fixtures"]

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
