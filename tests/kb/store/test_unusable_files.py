"""A file or a place that cannot be the store is named, with what to do, and left alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import pytest

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import history, save
from kb.store.schema import SCHEMA
from tests.support.store_files import query, report


def another_program(path: Path) -> None:
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE report (mine)")
    connection.commit()
    connection.close()


def torn(path: Path) -> None:
    save(Database.open(path), [report(f"entry-{number}") for number in range(40)])
    data = bytearray(path.read_bytes())
    data[4096:] = b"\x5a" * (len(data) - 4096)
    path.write_bytes(data)


def newer(path: Path) -> None:
    save(Database.open(path), [report()])
    query(path, f"PRAGMA user_version={SCHEMA + 1}")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_text("this is not a database " * 100), "not a database"),
        (another_program, "database of another program"),
        (lambda path: query(path, "PRAGMA application_id=7"), "database of another program"),
        (torn, "malformed"),
        (newer, f"newer kb: its schema is {SCHEMA + 1}, this one knows {SCHEMA}"),
        (lambda path: path.mkdir(), "unable to open"),
    ],
    ids=["text", "another program", "another program, empty", "torn", "newer", "directory"],
)
def test_a_file_that_cannot_be_used_is_named_and_left_alone(path: Path, make: Any, message: str) -> None:
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    for use in (lambda: save(Database.open(path), [report()]), lambda: history(Database.open(path))):
        with pytest.raises(StoreUnavailable, match=message) as caught:
            use()
        assert str(path) in caught.value.message
        assert caught.value.hint
    assert (path.read_bytes() if path.is_file() else None) == before
    assert [item.name for item in path.parent.iterdir()] == [path.name]


def test_an_empty_file_as_a_kill_leaves_it_is_taken_for_a_new_store(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    assert history(Database.open(path)) == []
    save(Database.open(path), [report()])
    assert len(history(Database.open(path))) == 1


@pytest.mark.parametrize("blocked", ["/proc/kb/reports.db", "a-file/reports.db"])
def test_a_place_that_cannot_be_written_says_what_to_set(tmp_path: Path, blocked: str) -> None:
    (tmp_path / "a-file").touch()
    opened = Database.open(tmp_path / blocked)
    with pytest.raises(StoreUnavailable, match="cannot be written") as caught:
        save(opened, [])
    assert "XDG_DATA_HOME" in caught.value.hint
    assert history(opened) == []


def test_messages_hold_neither_sql_nor_values(path: Path) -> None:
    path.parent.mkdir()
    another_program(path)
    query(path, f"PRAGMA application_id={sqlite.APPLICATION_ID}")
    query(path, f"PRAGMA user_version={SCHEMA}")
    with pytest.raises(StoreUnavailable) as caught:
        save(Database.open(path), [report()])
    assert "INSERT" not in caught.value.message
    assert "DROP TABLE" not in caught.value.message
