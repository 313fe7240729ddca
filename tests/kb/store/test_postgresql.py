"""A store on a PostgreSQL server: what it is called, and what happens when the server does not answer."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlmodel import Session

from kb.errors import StoreUnavailable, UsageError
from kb.store import content_generation, keys, postgresql
from kb.store.database import Database
from kb.store.keys import Scope
from kb.store.reports import add_shared, history, page, save
from kb.store.tables import StateRow
from tests.support.console import CHECKOUT
from tests.support.postgres_server import Server

pytest_plugins = ["tests.support.postgres_fixtures"]

SECRET = "hunter2"
REPORT: dict[str, Any] = {
    **dict.fromkeys(("id", "verdict", "fidelity", "entry_digest", "probe_digest", "kb_version"), "x"),
    "started_at": "2026-03-01T00:00:00+00:00",
    "duration_s": 1.0,
}


@pytest.fixture
def opened(postgres_url: str) -> Iterator[Database]:
    with Database.open(postgres_url) as result:
        yield result


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a server that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def test_a_store_that_cannot_be_reached_is_named_without_its_password(silent: int) -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    closed = listener.getsockname()[1]
    listener.close()
    for port in (closed, silent):
        url = f"postgresql://kb:{SECRET}@127.0.0.1:{port}/kb?password={SECRET}"
        with Database.open(url) as opened, pytest.raises(StoreUnavailable) as caught:
            history(opened)
        assert f"postgresql://127.0.0.1:{port}/kb" in caught.value.message
        assert caught.value.hint
        assert SECRET not in caught.value.message + repr(opened) + opened.name


@pytest.mark.parametrize("use", ["save", "history", "prepare", "advance", "page"])
def test_a_killed_server_is_unavailable_and_is_used_again_once_it_is_back(
    postgres: Server, opened: Database, use: str
) -> None:
    uses: dict[str, Callable[[], object]] = {
        "save": lambda: save(opened, [REPORT]),
        "history": lambda: history(opened),
        "prepare": opened.prepare,
        "advance": lambda: content_generation.advance(opened),
        "page": lambda: page(opened),
    }
    kept = add_shared(opened, REPORT, "node", "key", "digest")
    postgres.kill()
    with pytest.raises(StoreUnavailable):
        uses[use]()
    postgres.start()
    uses[use]()
    assert [item.id for item in page(opened)] == [kept.id]


def test_a_server_killed_in_the_middle_of_a_write_keeps_nothing_of_it(postgres: Server, opened: Database) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be written"), opened.writing() as session:
        session.add(StateRow(name="half", value=1))
        session.flush()
        postgres.kill()
        session.add(StateRow(name="other half", value=1))
    postgres.start()
    with opened.reading() as session:
        assert session
        assert session.get(StateRow, "half") is None


def test_a_server_that_stops_answering_is_given_up_and_is_used_again_when_it_goes_on(
    postgres: Server, opened: Database
) -> None:
    """Stopped processes: the kernel of their machine still takes what is sent."""
    opened.prepare()
    with opened.reading(), postgres.frozen():
        pass  # a connection of the pool is in use
    with postgres.frozen():
        for _ in range(2):
            with pytest.raises(StoreUnavailable):
                save(opened, [REPORT])
    save(opened, [REPORT])
    assert len(history(opened)) == 1


def test_reports_that_were_acknowledged_outlive_a_kill(postgres: Server, opened: Database) -> None:
    acknowledged: list[int] = []

    def send(sender: int) -> None:
        try:
            for number in range(1000):
                acknowledged.append(add_shared(opened, REPORT, f"node-{sender}", f"key-{number}", "digest").id)
                if sender == 0 and number == 10:
                    postgres.kill()
        except StoreUnavailable:
            return

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(send, sender) for sender in range(4)]:
            done.result()
    postgres.start()
    assert len(acknowledged) > 10
    assert set(acknowledged) <= {item.id for item in page(opened, limit=10_000)}


def test_a_report_that_two_keys_send_at_once_is_stored_once(opened: Database) -> None:
    names = [keys.new(opened, name, Scope.REPORT)[0].id for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        for number in range(20):
            sent = [pool.submit(add_shared, opened, REPORT, name, f"key-{number}", "digest") for name in names]
            assert len({item.result().id for item in sent}) == 1
    assert len(page(opened, limit=100)) == 20


def test_a_statement_that_takes_too_long_is_ended(postgres_url: str) -> None:
    with (
        Database.open(f"{postgres_url}?options=-c%20statement_timeout%3D100ms") as opened,
        pytest.raises(StoreUnavailable, match="statement timeout") as caught,
        opened.writing() as session,
    ):
        session.connection().exec_driver_sql("SELECT pg_sleep(60)")
    assert "try again" in caught.value.hint


def test_every_connection_limits_its_statements_and_its_wait_for_locks(opened: Database) -> None:
    with opened.writing() as session:
        shown = [
            session.connection().exec_driver_sql(f"SHOW {name}").scalar()
            for name in ("statement_timeout", "lock_timeout", "idle_in_transaction_session_timeout", "application_name")
        ]
    assert shown == ["5s", "4s", "30s", "kb"]


def test_more_threads_than_connections_wait_for_one(opened: Database) -> None:
    with ThreadPoolExecutor(30) as pool:
        numbers = list(pool.map(lambda _: content_generation.advance(opened), range(60)))
    assert sorted(numbers) == list(range(1, 61))


def test_messages_hold_neither_sql_nor_values(opened: Database) -> None:
    with opened.writing() as session:
        session.connection().exec_driver_sql("ALTER TABLE report ADD CONSTRAINT small CHECK (entry_id <> 'x')")
    with pytest.raises(StoreUnavailable, match="violates check constraint") as caught:
        save(opened, [{**REPORT, "kb_version": SECRET}])
    assert not re.search(f"INSERT|{SECRET}|DETAIL|\n", caught.value.message)


@pytest.mark.parametrize("kind", ["sqlite", "postgresql"])
def test_what_only_reads_cannot_write(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    where = tmp_path / "reports.db" if kind == "sqlite" else request.getfixturevalue("postgres_url")
    with Database.open(where) as opened:
        opened.prepare()
        with pytest.raises(StoreUnavailable, match=r"read-?only"), opened.reading() as session:
            assert session
            session.connection().exec_driver_sql("DELETE FROM report")


def test_an_empty_database_is_read_as_one_where_nothing_was_kept(empty_postgres_url: str) -> None:
    with Database.open(empty_postgres_url) as opened:
        assert not (history(opened) or page(opened))
        with Session(opened.backend.engine) as session:
            assert (
                session.connection()
                .exec_driver_sql("SELECT count(*) FROM pg_tables WHERE schemaname='public'")
                .scalar()
                == 0
            )


@pytest.mark.parametrize("scheme", ["postgres", "postgresql", "postgresql+psycopg", "postgresql+psycopg2"])
def test_every_way_to_write_the_scheme_is_the_same_server(postgres_url: str, scheme: str) -> None:
    with Database.open(postgres_url.replace("postgresql", scheme)) as opened:
        save(opened, [REPORT])
        assert len(history(opened)) == 1


@pytest.mark.parametrize(
    "url",
    [
        f"mysql://kb:{SECRET}@host/kb",
        f"postgresql://kb:{SECRET}@host:port/kb",
        f"postgresql://kb:a@{SECRET}@host/kb",
        "sqlite://",
        "sqlite:///:memory:",
    ],
)
def test_a_url_that_names_no_store_is_refused_without_repeating_it(url: str) -> None:
    with pytest.raises(UsageError) as caught:
        Database.open(url)
    assert "postgresql://" in caught.value.hint
    assert SECRET not in str(caught.value)


def test_a_missing_driver_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(UsageError, match="needs psycopg") as caught:
        Database.open("postgresql://host/kb")
    assert f"pip install -e '{CHECKOUT}[server]'" in caught.value.hint


def test_nothing_waits_without_a_limit() -> None:
    assert {"connect_timeout", "tcp_user_timeout", "keepalives_idle"} <= postgresql.CONNECTION.keys()
    assert "pool_timeout" in postgresql.POOL
