"""A real PostgreSQL server for tests, and `database`, a new store once in SQLite and once in PostgreSQL.

A test file uses `pytest_plugins = ["tests.support.postgres_fixtures"]`. Without PostgreSQL, its half of the tests is
skipped; with KB_REQUIRE_ALL=1 it fails.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from kb.store.database import Database
from tests.support.postgres_server import Server, binaries, free_port, user
from tests.support.ready_store import ready_store

NUMBERS = count(1)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server, shared by all tests of a process. A test that kills it does not have to start it again."""
    result = binaries()
    if result is None:
        message = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("KB_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    # Not below pytest's directories, which another user cannot enter; nor deep, since a socket's path must be short.
    directory = Path(tempfile.mkdtemp(prefix="kb-postgres-", dir="/tmp"))
    if os.getuid() == 0:
        os.chown(directory, user().pw_uid, user().pw_gid)
    server = Server(result, directory, free_port())
    try:
        server.init()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_template(postgres: Server) -> str:
    """A database with the current schema to copy from, which is faster than migrating each."""
    postgres.start()
    postgres.execute("CREATE DATABASE migrated")
    with Database.open(postgres.url("migrated")) as opened:
        opened.prepare()
    return "migrated"


@pytest.fixture
def empty_postgres_url(postgres: Server) -> Iterator[str]:
    """The URL of a new database without tables."""
    with _fresh(postgres, "template1") as url:
        yield url


@pytest.fixture
def postgres_url(postgres: Server, postgres_template: str) -> Iterator[str]:
    """The URL of a new store with the current schema."""
    with _fresh(postgres, postgres_template) as url:
        yield url


@contextmanager
def _fresh(server: Server, template: str) -> Iterator[str]:
    server.start()
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server.url(name)
    server.start()
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new store with the current schema, of both kinds, for processes that open it themselves."""
    if request.param == "sqlite":
        return f"sqlite:///{ready_store(tmp_path / 'store' / 'reports.db')}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A new store, of both kinds."""
    with Database.open(database_url) as opened:
        yield opened
