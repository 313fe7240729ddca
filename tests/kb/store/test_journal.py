"""How SQLite writes: with a WAL, except where its shared memory is not shared."""

from __future__ import annotations

from pathlib import Path

from kb.store.database import Database
from kb.store.reports import save
from kb.store.sqlite import journal_mode
from tests.support.store_files import query, report


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
