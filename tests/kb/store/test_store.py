"""The store keeps what it acknowledged, through kills, crowds, full disks and files of other programs."""

from __future__ import annotations

import datetime
import json
import sqlite3
import stat
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kb.errors import StoreUnavailable
from kb.store import sqlite
from kb.store.database import Database
from kb.store.reports import compare_wording, history, save
from kb.store.schema import SCHEMA
from kb.store.sqlite import journal_mode
from kb.verify.report import Report
from kb.verify.verdict import Judgement, Verdict
from tests.support.console import GENEROUS_S, end

WRITER = """
import json, sys
from pathlib import Path
from kb.store.database import Database
from kb.store.reports import save

batch = json.loads(Path(sys.argv[2]).read_text())
print("ready", flush=True)
sys.stdin.readline()
for number in range(int(sys.argv[4])):
    name = f"{sys.argv[3]}-{number}"
    save(Database.open(Path(sys.argv[1])), [{**one, "batch": name} for one in batch])
    print(name, flush=True)
"""
FILLER = """
import json, resource, sys
from pathlib import Path
from kb.errors import StoreUnavailable
from kb.store.database import Database
from kb.store.reports import save

document = json.loads(Path(sys.argv[2]).read_text())[0]
resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10))
kept = 0
try:
    for kept in range(1000):
        save(Database.open(Path(sys.argv[1])), [document])
except StoreUnavailable as error:
    print(json.dumps([kept, error.message, error.hint]))
"""


def report(entry_id: str = "the-entry", minute: int = 0, verdict: Verdict = Verdict.VERIFIED) -> dict[str, Any]:
    started = datetime.datetime(2026, 3, 1, 8, minute, tzinfo=datetime.timezone(datetime.timedelta(hours=8)))
    made = Report(
        entry_id=entry_id,
        title="A title, 标题",
        judgement=Judgement(verdict, "because"),
        entry_digest="e" * 64,
        probe_digest="p" * 64,
        started_at=started,
        duration_s=1.5,
        environment={"torch": None, "host": "a'b\"; DROP TABLE report"},
    )
    return made.to_json()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "kb" / "reports.db"


@pytest.fixture
def batch(tmp_path: Path) -> Path:
    """Three reports as a file, for a child process to save at once."""
    file = tmp_path / "batch.json"
    file.write_text(json.dumps([report(f"entry-{number}") for number in range(3)]))
    return file


def query(path: Path, sql: str) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


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


def test_a_full_disk_loses_nothing_that_was_kept(path: Path, batch: Path) -> None:
    output = subprocess.check_output([sys.executable, "-c", FILLER, str(path), str(batch)], timeout=GENEROUS_S)
    kept, message, hint = json.loads(output)
    assert kept > 0
    assert "cannot be written" in message
    assert "space" in hint
    opened = Database.open(path)
    assert len(history(opened, limit=2000)) == kept
    save(opened, [report()])
    assert query(path, "PRAGMA integrity_check") == [("ok",)]


def writers(path: Path, batch: Path, count: int, saves: int) -> list[subprocess.Popen[str]]:
    """Processes that stand ready to save, and begin at the same moment."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(batch), f"writer{number}", str(saves)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(count)
    ]
    for item in started:
        assert item.stdout
        assert item.stdout.readline() == "ready\n"
    for item in started:
        assert item.stdin
        item.stdin.write("\n")
        item.stdin.flush()
    return started


def close(process: subprocess.Popen[Any]) -> None:
    end(process)
    for stream in (process.stdin, process.stdout):
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
            acknowledged |= {item.stdout.readline().strip() for _ in range(3 + 4 * number)}
            item.kill()
            acknowledged |= {line.strip() for line in item.stdout if line.endswith("\n")}
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


def test_an_edited_entry_marks_its_reports_and_an_absent_one_does_not() -> None:
    documents = [report("same"), report("edited"), report("gone")]
    marked = compare_wording(documents, {"same": "e" * 64, "edited": "f" * 64})
    assert [item["earlier_wording"] for item in marked] == [False, True, None]
    assert "earlier_wording" not in documents[0]


def test_wal_is_used_except_where_its_shared_memory_is_not_shared() -> None:
    mounts = "/dev/sda / ext4 rw\nserver:/home /home nfs4 rw\n/dev/sdb /home/local xfs rw\nfs /fast lustre rw\n"
    assert journal_mode(Path("/var/kb/reports.db"), mounts) == "WAL"
    assert journal_mode(Path("/home/me/reports.db"), mounts) == "DELETE"
    assert journal_mode(Path("/home/local/reports.db"), mounts) == "WAL"
    assert journal_mode(Path("/fast/me/reports.db"), mounts) == "DELETE"
    assert journal_mode(Path("/home/me/reports.db"), "") == "WAL"


def test_the_journal_of_a_local_store_is_wal(tmp_path: Path, path: Path) -> None:
    save(Database.open(path), [report()])
    expected = journal_mode(path.resolve(), Path("/proc/mounts").read_text()).lower()
    assert query(path, "PRAGMA journal_mode") == [(expected,)]
