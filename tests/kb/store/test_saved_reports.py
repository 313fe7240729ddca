"""A report comes back as it was saved, newest first, from a store that only its owner can read."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from kb.store.database import Database
from kb.store.reports import compare_wording, history, save
from kb.verify.verdict import Verdict
from tests.support.store_files import query, report


def test_a_report_comes_back_as_it_was_saved(path: Path) -> None:
    with Database.open(path) as opened:
        save(opened, [report()])
        assert history(opened) == [json.loads(json.dumps(report()))]


def test_history_is_newest_first_by_time_then_by_arrival(path: Path) -> None:
    opened = Database.open(path)
    save(opened, [report("b", 30), report("c", 50)])
    save(opened, [report("a", 10), report("d", 50)])
    assert [item["id"] for item in history(opened)] == ["d", "c", "b", "a"]
    assert [item["id"] for item in history(opened, limit=2)] == ["d", "c"]


def test_history_of_one_entry_holds_no_other(path: Path) -> None:
    opened = Database.open(path)
    save(opened, [report("a", 1), report("b", 2), report("a", 3, Verdict.EXPOSED)])
    assert [(item["id"], item["verdict"]) for item in history(opened, "a")] == [("a", "exposed"), ("a", "verified")]
    assert history(opened, "c") == []


def test_columns_tell_time_in_utc(path: Path) -> None:
    save(Database.open(path), [report(minute=30)])
    assert query(path, "SELECT entry_id, verdict, fidelity, started_at FROM report") == [
        ("the-entry", "verified", "check", "2026-03-01 00:30:00.000000")
    ]


def test_reading_a_store_that_does_not_exist_makes_none(path: Path) -> None:
    assert history(Database.open(path)) == []
    assert not path.parent.exists()


def test_the_store_of_a_user_is_theirs_alone(home: Path) -> None:
    directory = home / "data" / "kb"
    directory.mkdir(parents=True, mode=0o755)
    with Database.open() as opened:
        save(opened, [])
        assert opened.name == str(directory / "reports.db")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700


def test_a_new_directory_is_private(path: Path) -> None:
    save(Database.open(path), [report()])
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_edited_entry_marks_its_reports_and_an_absent_one_does_not() -> None:
    documents = [report("same"), report("edited"), report("gone")]
    marked = compare_wording(documents, {"same": "e" * 64, "edited": "f" * 64})
    assert [item["earlier_wording"] for item in marked] == [False, True, None]
    assert "earlier_wording" not in documents[0]
