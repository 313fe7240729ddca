"""The queue of excerpts that no entry explained."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from kb.authoring import unexplained_queue
from kb.errors import StoreUnavailable, UsageError

LOG = "meichen@gpu-01:~$ torchrun\n[rank3]: acme.ShardError: shard 17 of 32, password=hunter2hunter2\n"


def test_what_is_saved_is_redacted_and_can_be_loaded() -> None:
    path = unexplained_queue.save(LOG, ["/home/meichen/job.log"], ["rank 3 of gpu-01 raised acme.ShardError"])
    (item,) = unexplained_queue.queued()
    assert unexplained_queue.load(path.stem) == item
    assert (
        item.excerpt == "<user-1>@<host-1>:~$ torchrun\n[rank3]: acme.ShardError: shard 17 of 32, password=<secret-1>\n"
    )
    assert item.sources == ("/home/<user-1>/job.log",)
    assert item.seen == ("rank 3 of <host-1> raised acme.ShardError",)
    assert "hunter2" not in path.read_text()
    assert "meichen" not in path.read_text()


def test_only_the_owner_may_look(home: Path) -> None:
    os.umask(before := os.umask(0))
    path = unexplained_queue.save(LOG, [], [])
    assert before == os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.is_relative_to(home / "data")


def test_the_same_excerpt_is_kept_once_with_a_count() -> None:
    first = unexplained_queue.save(LOG, ["a.log"], [])
    again = unexplained_queue.save(LOG.replace("hunter2hunter2", "another1another1"), ["b.log"], [])
    unexplained_queue.save("something else\n", [], [])
    assert again == first
    assert len(unexplained_queue.queued()) == 2
    item = unexplained_queue.load(first.stem)
    assert (item.count, item.sources) == (2, ("b.log",))
    assert item.first <= item.last


def test_a_long_excerpt_is_cut_at_a_line_end() -> None:
    line = "[rank3]: step 17 of 32 中文\n"
    item = unexplained_queue.load(unexplained_queue.save(line * 10_000, [], []).stem)
    assert len(item.excerpt.encode()) <= unexplained_queue.LONGEST
    assert item.excerpt == line * item.excerpt.count("\n")
    assert item.excerpt.count("\n") > 2000


def test_a_secret_that_the_cut_would_halve_is_dropped() -> None:
    text = "x" * (unexplained_queue.LONGEST - 20) + " hf_" + "Zq7abcdefghijklmnopqrstuvwxyz0123456789"
    assert "hf_" not in unexplained_queue.load(unexplained_queue.save(text, [], []).stem).excerpt


def test_bytes_that_are_no_text_do_not_stop_it() -> None:
    item = unexplained_queue.load(unexplained_queue.save("bad \udcff\udcfe bytes\n", ["\udcff.log"], ["\udcff"]).stem)
    assert item.excerpt == "bad ?? bytes\n"


def test_the_queue_keeps_the_newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unexplained_queue, "MOST_FILES", 3)
    paths = []
    for number in range(5):
        paths.append(unexplained_queue.save(f"excerpt {number}\n", [], []))
        os.utime(paths[-1], (number, number))
    assert sorted(unexplained_queue.folder().glob("*.json")) == sorted(paths[2:])


def test_damaged_and_foreign_files_are_left_out_and_left_alone() -> None:
    path = unexplained_queue.save(LOG, [], [])
    folder = path.parent
    (folder / "2026-01-01-0123456789ab.json").write_text("{")
    (folder / "2026-01-02-0123456789ab.json").write_text(json.dumps({"schema": "other"}))
    (folder / "2026-01-03-0123456789ab.json").write_text("[" * 100_000)
    (folder / "notes.json").write_text("{}")
    assert [item.id for item in unexplained_queue.queued()] == [path.stem]
    assert len(list(folder.iterdir())) == 5


@pytest.mark.parametrize("wrong", ["2026-01-01-0123456789ab", "../reports", "", "notes"])
def test_an_id_that_is_none_is_a_usage_error_that_names_the_newest(wrong: str) -> None:
    path = unexplained_queue.save(LOG, [], [])
    with pytest.raises(UsageError) as caught:
        unexplained_queue.load(wrong)
    assert path.stem in caught.value.hint


def test_a_place_that_cannot_be_written_is_said(home: Path) -> None:
    (home / "data").write_text("a file where the folder should be")
    with pytest.raises(StoreUnavailable, match="queue of unexplained logs"):
        unexplained_queue.save(LOG, [], [])
    assert unexplained_queue.queued() == []
