"""The store keeps what it acknowledged, through kills, crowds and full disks."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections import Counter
from pathlib import Path

import pytest

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import history, save
from tests.support.console import GENEROUS_S, end
from tests.support.store_files import query, report
from tests.support.store_programs import run_program, start_program
from tests.support.warm_start import Fork


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Three reports as a file, for a child process to save at once."""
    file = tmp_path / "batch.json"
    file.write_text(json.dumps([report(f"entry-{number}") for number in range(3)]))
    return file


def test_a_writer_that_never_ends_is_named_after_a_wait(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sqlite, "BUSY_S", 0.1)
    opened = Database.open(path)
    save(opened, [report()])
    writer = sqlite3.connect(path, isolation_level=None)
    writer.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreUnavailable, match="locked") as caught:
        save(opened, [report()])
    writer.close()
    assert "try again" in caught.value.hint
    save(opened, [report()])
    assert len(history(opened)) == 2


def test_a_full_disk_loses_nothing_that_was_kept(path: Path, batch: Path) -> None:
    kept, message, hint = json.loads(run_program("save_until_full", path, batch))
    assert kept > 0
    assert "cannot be written" in message
    assert "space" in hint
    opened = Database.open(path)
    assert len(history(opened, limit=2000)) == kept
    save(opened, [report()])
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def writers(path: Path, batch: Path, count: int, saves: int) -> list[Fork]:
    """Processes that stand ready to save, and begin at the same moment."""
    started = [start_program("save_batches", path, batch, f"writer{number}", str(saves)) for number in range(count)]
    for item in started:
        assert item.stdout
        assert item.stdout.readline() == b"ready\n"
    for item in started:
        assert item.stdin
        item.stdin.write(b"\n")
        item.stdin.flush()
    return started


def close(process: Fork) -> None:
    end(process)
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream:
            stream.close()


def batches(path: Path) -> Counter[str]:
    return Counter(item["batch"] for item in history(Database.open(path), limit=10**6))


def test_processes_that_save_their_first_report_at_once_all_succeed(path: Path, batch: Path) -> None:
    started = writers(path, batch, count=4, saves=5)
    try:
        assert [item.wait(GENEROUS_S) for item in started] == [0] * 4
    finally:
        for item in started:
            close(item)
    assert batches(path) == {f"writer{writer}-{number}": 3 for writer in range(4) for number in range(5)}


def test_killed_in_the_middle_of_a_save_it_leaves_an_intact_store(path: Path, batch: Path) -> None:
    started = writers(path, batch, count=4, saves=10**6)
    acknowledged = set()
    try:
        for number, item in enumerate(started):
            assert item.stdout
            acknowledged |= {item.stdout.readline().decode().strip() for _ in range(3 + 4 * number)}
            item.kill()
            acknowledged |= {line.decode().strip() for line in item.stdout if line.endswith(b"\n")}
    finally:
        for item in started:
            close(item)
    result = batches(path)
    assert acknowledged <= result.keys()
    assert set(result.values()) == {3}, "a batch is there whole or not at all"
    assert query(path, "PRAGMA integrity_check") == [("ok",)]
    save(Database.open(path), [report()])


def test_threads_may_share_one_store(path: Path) -> None:
    opened = Database.open(path)
    failures: list[Exception] = []

    def work() -> None:
        try:
            for minute in range(10):
                save(opened, [report(minute=minute)])
                assert history(opened)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GENEROUS_S)
    assert failures == []
    assert len(history(opened, limit=100)) == 60
