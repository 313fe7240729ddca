"""The outbox: a report is there as a whole or not at all, for one sender at a time, and never without bound."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kb.errors import StoreUnavailable
from kb.sharing import outbox as module
from kb.sharing.outbox import Outbox, QueuedReport
from tests.support.fake_service import report

URL = "https://kb.example.org"
FULL = """
import resource, sys
from pathlib import Path
from kb.errors import StoreUnavailable
from kb.sharing.outbox import Outbox

resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 10, 8 << 10))
small, large = {"id": "small"}, {"id": "large", "reason": "x" * (16 << 10)}
try:
    Outbox(Path(sys.argv[1])).add("https://kb.example.org", [small, large, small])
except StoreUnavailable as error:
    print(error.message)
"""
HOLD = """
import sys, time
from pathlib import Path
from kb.sharing.outbox import Outbox

outbox = Outbox(Path(sys.argv[1]))
(queued,) = outbox.waiting("https://kb.example.org")
with outbox.claim(queued) as is_ours:
    print(is_ours, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "data" / "outbox")


def only(outbox: Outbox) -> QueuedReport:
    (queued,) = outbox.waiting(URL)
    return queued


def test_what_was_queued_waits_for_its_service_alone(outbox: Outbox) -> None:
    assert outbox.waiting(URL) == []
    outbox.add(URL, [report("one")])
    outbox.add("https://other.example.org", [report("two")])
    queued = only(outbox)
    assert queued.report == report("one")
    assert json.loads(queued.body) == report("one")
    assert only(outbox).body == queued.body


def test_it_is_readable_by_this_user_alone(outbox: Outbox) -> None:
    outbox.add(URL, [report()])
    (path,) = outbox.directory.iterdir()
    assert path.name == f"{only(outbox).key}.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(outbox.directory.stat().st_mode) == 0o700


def test_the_oldest_is_first(outbox: Outbox) -> None:
    for age, name in ((1, "new"), (3, "old"), (2, "middle")):
        outbox.add(URL, [report(name)])
        key = next(queued.key for queued in outbox.waiting(URL) if queued.report["id"] == name)
        os.utime(outbox.directory / f"{key}.json", (time.time() - age * 60,) * 2)
    assert [queued.report["id"] for queued in outbox.waiting(URL)] == ["old", "middle", "new"]


def test_beyond_the_bound_the_oldest_goes_and_that_is_said(outbox: Outbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_REPORTS", 3)
    assert outbox.add(URL, [report(f"old-{number}") for number in range(3)]) == 0
    for path in outbox.directory.iterdir():
        os.utime(path, (1, 1))
    assert outbox.add(URL, [report("new-1"), report("new-2")]) == 2
    assert [queued.report["id"][:3] for queued in outbox.waiting(URL)] == ["old", "new", "new"]


def test_files_of_others_and_damaged_ones_are_passed_over_and_left(outbox: Outbox) -> None:
    outbox.add(URL, [report("sound")])
    strange = {
        "empty.json": b"",
        "list.json": b"[1]",
        "torn.json": b'{"url": "https://kb.exa',
        "bomb.json": b"[" * 100_000,
        "text.json": b"\xff\xfe",
        "shape.json": json.dumps({"url": URL, "report": "text"}).encode(),
        ".half.json": json.dumps({"url": URL, "report": {}}).encode(),
    }
    for name, content in strange.items():
        (outbox.directory / name).write_bytes(content)
    assert only(outbox).report["id"] == "sound"
    assert {path.name for path in outbox.directory.iterdir()} >= set(strange)


def test_one_sender_at_a_time(outbox: Outbox) -> None:
    outbox.add(URL, [report()])
    with outbox.claim(only(outbox)) as first, outbox.claim(only(outbox)) as second:
        assert (first, second) == (True, False)
    with outbox.claim(only(outbox)) as again:
        assert again


def test_what_another_process_has_sent_meanwhile_cannot_be_claimed(outbox: Outbox) -> None:
    outbox.add(URL, [report()])
    queued = only(outbox)
    outbox.remove(queued)
    outbox.remove(queued)
    with outbox.claim(queued) as is_ours:
        assert not is_ours


def test_the_claim_of_a_killed_process_is_taken_over(outbox: Outbox) -> None:
    outbox.add(URL, [report()])
    with subprocess.Popen([sys.executable, "-c", HOLD, str(outbox.directory)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"True\n"
        with outbox.claim(only(outbox)) as is_ours:
            assert not is_ours
        holder.kill()
    with outbox.claim(only(outbox)) as is_ours:
        assert is_ours


def test_a_refused_report_is_put_aside_with_the_reason(outbox: Outbox) -> None:
    outbox.add(URL, [report()])
    queued = only(outbox)
    path = outbox.refuse(queued, "it has no verdict")
    assert outbox.waiting(URL) == []
    assert path == outbox.directory / "refused" / f"{queued.key}.json"
    assert json.loads(path.read_text()) == {"url": URL, "report": report(), "problem": "it has no verdict"}


def test_a_full_disk_is_said_and_what_was_whole_stays(outbox: Outbox) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FULL, str(outbox.directory)], capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == f"the outbox {outbox.directory} cannot be used: File too large\n"
    assert only(outbox).report == {"id": "small"}
    assert len(list(outbox.directory.iterdir())) == 1


def test_an_outbox_that_is_no_directory_is_said(outbox: Outbox) -> None:
    outbox.directory.parent.mkdir()
    outbox.directory.write_text("mine")
    with pytest.raises(StoreUnavailable, match=r"outbox cannot be used"):
        outbox.add(URL, [report()])
    with pytest.raises(StoreUnavailable):
        outbox.waiting(URL)
    assert outbox.directory.read_text() == "mine"
