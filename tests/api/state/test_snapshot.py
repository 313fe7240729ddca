"""What a process believes while the database is away, and for how long."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from pkgutil import resolve_name
from threading import Event
from typing import Any

import pytest

from kb.errors import StoreUnavailable
from kb.store import content_generation, keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.clock import Clock
from tests.support.console import wait_for

background: Any = resolve_name("kb.api.state.background")
snapshot: Any = resolve_name("kb.api.state.snapshot")


@pytest.fixture
def where(tmp_path: Path) -> Path:
    return tmp_path / "service.db"


def broken(where: Path) -> None:
    for path in where.parent.glob("service.db*"):
        path.write_text("no database " * 100)


def test_without_any_database_nothing_is_known_and_nothing_is_made(where: Path) -> None:
    with Database.open(where) as store:
        taken = snapshot.Snapshot(store)
        taken.refresh()
    assert (taken.is_up, taken.generation, taken.reports, list(taken.verdict_counts)) == (True, 0, 0, [])
    assert taken.key("aaaaaaaa") is None
    assert not where.exists()


@pytest.mark.parametrize("is_deleted", [True, False])
def test_a_store_that_is_deleted_or_emptied_under_a_service_locks_nobody_out(
    where: Path, caplog: pytest.LogCaptureFixture, is_deleted: bool
) -> None:
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        taken = snapshot.Snapshot(store)
        taken.refresh()
        for path in where.parent.glob("service.db*"):
            path.unlink() if is_deleted else path.write_bytes(b"")
        taken.refresh()
        assert taken.key(key.id).key == key
    assert taken.is_up is False
    assert "lost its keys" in caplog.text


def test_keys_are_believed_for_a_quarter_of_an_hour_without_the_database(
    where: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        content_generation.advance(store)
        taken = snapshot.Snapshot(store, clock)
        taken.refresh()
        broken(where)
        for _ in range(3):
            clock.now += 299.0
            taken.refresh()
            assert taken.key(key.id).key == key
        assert taken.is_up is False
        assert taken.generation == 1
        clock.now += 10.0
        with pytest.raises(StoreUnavailable):
            taken.key(key.id)
    assert len([record for record in caplog.records if "is served" in record.getMessage()]) == 1


def test_before_the_database_was_ever_read_no_key_is_judged(where: Path, caplog: pytest.LogCaptureFixture) -> None:
    where.write_text("no database " * 100)
    with Database.open(where) as store:
        taken = snapshot.Snapshot(store)
        taken.refresh()
        with pytest.raises(StoreUnavailable):
            taken.key("aaaaaaaa")
        assert not taken.knows_keys
        assert taken.generation is None
    assert "never read" in caplog.text
    assert "is served" not in caplog.text


def test_a_jump_of_the_clock_of_the_machine_ends_no_belief(where: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        taken = snapshot.Snapshot(store)
        taken.refresh()
        for jump in (1e9, -1e9):
            now = time.time()
            monkeypatch.setattr(time, "time", lambda now=now, jump=jump: now + jump)
            assert taken.key(key.id).key == key


def test_a_row_that_is_none_of_ours_makes_the_database_unreadable_and_no_more(where: Path) -> None:
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        with closing(sqlite3.connect(where)) as raw, raw:
            raw.execute("UPDATE api_key SET created_at = 5")
        taken = snapshot.Snapshot(store)
        taken.refresh()
        assert taken.is_up is False
        with closing(sqlite3.connect(where)) as raw, raw:
            raw.execute("UPDATE api_key SET created_at = '2026-03-01 00:00:00'")
        taken.refresh()
        assert taken.key(key.id).key.id == key.id


def test_work_that_fails_is_done_again(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work() -> None:
        done.append(1)
        if len(done) == 1:
            raise TypeError("of the first time")

    with background.repeated(work, 0.01, "kb-test"):
        wait_for(lambda: len(done) > 1, "the second time")
    assert "kb-test failed" in caplog.text


def test_uses_are_written_in_one_go_and_kept_until_the_database_is_back(where: Path, tmp_path: Path) -> None:
    clock = Clock()
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        taken = snapshot.Snapshot(store, clock)
        taken.refresh()
        taken.use(key.id)
        taken.refresh()
        assert keys.list_all(store)[0].key.last_used_at is None
        away = where.rename(tmp_path / "away.db")
        where.write_text("no database " * 100)
        clock.now += snapshot.USES_S
        taken.refresh()
        away.rename(where)
        taken.refresh()
        assert keys.list_all(store)[0].key.last_used_at


def test_a_key_that_is_made_while_the_database_is_read_is_seen_by_the_next_look(where: Path) -> None:
    """Who comes after the keys were read must not be answered from them."""
    has_read, may_end = Event(), Event()

    class Slow(snapshot.Snapshot):  # type: ignore[misc]
        def _read(self) -> Any:
            known = super()._read()
            has_read.set()
            assert may_end.wait(60)
            return known

    async def ask(taken: Any, store: Database) -> None:
        first = asyncio.ensure_future(taken.refresh_soon())
        await asyncio.to_thread(has_read.wait, 60)
        key, _ = keys.new(store, "new", Scope.READ)
        second = asyncio.ensure_future(taken.refresh_soon())
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(first, second)
        assert taken.key(key.id)

    with Database.open(where) as store:
        keys.new(store, "old", Scope.READ)
        asyncio.run(ask(Slow(store), store))


def test_many_who_ask_for_unknown_keys_share_few_looks(where: Path) -> None:
    looks = []

    class Counted(snapshot.Snapshot):  # type: ignore[misc]
        def refresh(self) -> None:
            looks.append(1)
            super().refresh()

    async def ask(taken: Any) -> None:
        for _ in range(3):
            await asyncio.gather(*(taken.refresh_soon() for _ in range(100)))

    with Database.open(where) as store:
        taken = Counted(store)
        asyncio.run(ask(taken))
    assert len(looks) == 3
