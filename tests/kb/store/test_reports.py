"""Shared reports: each is kept once, however often and from how many sides it comes, and found by what it ran on."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kb.errors import KeyReused
from kb.store import audit, keys, reports, tables
from kb.store.database import Database
from kb.store.reports import AddedReport
from tests.support.console import GENEROUS_S

pytest_plugins = ["tests.support.postgres_fixtures"]

H100, A100 = "NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"
HOSTILE = ("'; DROP TABLE report; --", '" OR 1=1 --', "%", "_", "\\", "\0", "\ud800", "${7*7}", "标题' OR ''='")
SENDERS = """
import json, multiprocessing, sys
from kb.store.database import Database
from kb.store.reports import add_shared

def send(_):
    together.wait()
    database = Database.open(sys.argv[1])
    added = [add_shared(database, report, "node", f"key-{number}", "digest") for number in range(10)]
    return [(item.id, item.is_new) for item in added]

report = json.loads(sys.argv[2])
fork = multiprocessing.get_context("fork")
together = fork.Barrier(3)
with fork.Pool(3) as pool:
    print(json.dumps(pool.map(send, range(3), chunksize=1)))
"""


def report(entry_id: str = "the-entry", gpu: str = H100, torch: str = "2.7.1+cu126", **more: Any) -> dict[str, Any]:
    return {
        "id": entry_id,
        "verdict": "verified",
        "fidelity": "hardware",
        "started_at": "2026-03-01T08:00:00+08:00",
        "duration_s": 1.5,
        "entry_digest": "e" * 64,
        "probe_digest": "p" * 64,
        "kb_version": "0.1.0",
        "machine": {"gpus": [gpu] * 8 if gpu else [], "driver": "550.54", "torch": torch},
        **more,
    }


Admit = Callable[..., AddedReport]


@pytest.fixture
def admit(database: Database) -> Admit:
    """Admit a report under a key of its own."""
    numbers = iter(range(1000))

    def admitted(*words: str, **more: Any) -> AddedReport:
        number = next(numbers)
        return reports.add_shared(database, report(*words, **more), "node", f"key-{number}", f"digest-{number}")

    return admitted


def entries(database: Database, **filters: Any) -> list[str]:
    return [kept.document["id"] for kept in reports.page(database, **filters)]


def test_an_admitted_report_comes_back_as_it_was_sent(database: Database) -> None:
    before = tables.now()
    admitted = reports.add_shared(database, report(), "node", "key", "digest")
    [kept] = reports.page(database)
    assert (kept.id, kept.document, admitted.is_new) == (admitted.id, report(), True)
    assert before <= kept.received_at <= tables.now()


def test_a_report_that_comes_again_is_the_same_one(database: Database) -> None:
    first = reports.add_shared(database, report(), "node", "key", "digest")
    again = reports.add_shared(database, report(), "node", "key", "digest")
    assert again == AddedReport(first.id, is_new=False)
    assert len(reports.page(database)) == 1
    assert [item.subject for item in audit.page(database)] == [f"reports/{first.id}"]


def test_a_key_with_another_body_is_refused_and_the_first_report_stays(database: Database) -> None:
    reports.add_shared(database, report(), "node", "key", "digest")
    with pytest.raises(KeyReused, match="'key' was used for another report"):
        reports.add_shared(database, report("forged"), "node", "key", "another digest")
    assert entries(database) == ["the-entry"]


def test_two_senders_may_choose_the_same_key(database: Database) -> None:
    for sender in ("one", "two"):
        assert reports.add_shared(database, report(), sender, "key", f"digest of {sender}").is_new
    assert len(reports.page(database)) == 2


def test_a_report_that_comes_again_under_another_api_key_is_the_same_one(database: Database) -> None:
    old, new = (keys.new(database, "node", keys.Scope.REPORT)[0].id for _ in range(2))
    first = reports.add_shared(database, report(), old, "key", "digest")
    assert reports.add_shared(database, report(), new, "key", "digest") == AddedReport(first.id, is_new=False)
    assert reports.add_shared(database, report(), new, "key", "another digest").is_new
    assert reports.add_shared(database, report(), old, "key", "digest") == AddedReport(first.id, is_new=False)
    assert reports.count(database) == 2


def test_threads_that_send_the_same_report_at_once_make_one(database: Database) -> None:
    def send(_: int) -> AddedReport:
        return reports.add_shared(database, report(), "node", "key", "digest")

    with ThreadPoolExecutor(8) as pool:
        admitted = list(pool.map(send, range(40)))
    assert len({item.id for item in admitted}) == 1
    assert sum(item.is_new for item in admitted) == 1
    assert reports.count(database) == len(audit.page(database)) == 1


def test_processes_that_send_the_same_reports_at_once_make_one_each(database: Database, database_url: str) -> None:
    command = [sys.executable, "-c", SENDERS, database_url, json.dumps(report())]
    message = json.loads(subprocess.check_output(command, timeout=GENEROUS_S))
    ids = {identity for answers in message for identity, _ in answers}
    assert [len(answers) for answers in message] == [10, 10, 10]
    assert sum(is_new for answers in message for _, is_new in answers) == len(ids) == 10
    assert len(reports.page(database, limit=100)) == 10


def test_reports_are_paged_from_the_last_to_the_first(database: Database, admit: Admit) -> None:
    for number in range(7):
        admit(f"entry-{number}")
    seen: list[str] = []
    before = None
    while page := reports.page(database, limit=3, before=before):
        seen += [kept.document["id"] for kept in page]
        before = page[-1].id
        admit("late")  # what comes meanwhile neither repeats nor hides anything
    assert seen == [f"entry-{number}" for number in reversed(range(7))]


def test_a_clock_that_jumps_back_changes_no_order(
    database: Database, admit: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    admit("first")
    monkeypatch.setattr(reports, "now", lambda: datetime.datetime(1999, 1, 1))
    admit("second")
    assert entries(database) == ["second", "first"]
    first = reports.page(database, limit=1)[0].id
    assert entries(database, before=first) == ["first"]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ({}, ["d", "c", "b", "a"]),
        ({"entry": "b"}, ["b"]),
        ({"gpu": "h100"}, ["c", "a"]),
        ({"gpu": "A100-SXM4"}, ["b"]),
        ({"torch": "2.7"}, ["b", "a"]),
        ({"torch": "2.7."}, ["b", "a"]),
        ({"torch": "2"}, ["c", "b", "a"]),
        ({"torch": "2.7.1"}, ["a"]),
        ({"torch": "2.7.1+cu126"}, ["a"]),
        ({"verdict": "not-reproduced"}, ["c"]),
        ({"gpu": "h100", "torch": "2.7"}, ["a"]),
        ({"gpu": "%"}, []),
        ({"torch": "_"}, []),
        ({"entry": "e"}, []),
    ],
    ids=str,
)
def test_a_filter_finds_its_reports(
    database: Database, admit: Admit, filters: dict[str, str], expected: list[str]
) -> None:
    admit("a", H100, "2.7.1+cu126")
    admit("b", A100, "2.7.0")
    admit("c", H100, "2.70.0", verdict="not-reproduced")
    admit("d", "", "")
    assert entries(database, **filters) == expected


@pytest.mark.parametrize("text", HOSTILE)
def test_a_hostile_text_is_a_text_and_finds_nothing_else(database: Database, admit: Admit, text: str) -> None:
    admit()
    for name in ("entry", "gpu", "torch", "verdict"):
        assert entries(database, **{name: text}) == []
    assert reports.history(database, text) == []
    sent = reports.add_shared(database, report(text, text, text, verdict=text), text, text, "digest", request_id=text)
    assert reports.add_shared(database, report(text, text, text, verdict=text), text, text, "digest").id == sent.id
    assert entries(database) == [text, "the-entry"]
    assert reports.page(database, gpu=text)[0].id == sent.id
    assert len(reports.verdict_counts(database)) == 2


def test_the_standing_counts_what_reports_agree_in(database: Database, admit: Admit) -> None:
    for _ in range(3):
        admit("a")
    admit("a", verdict="not-reproduced")
    admit("a", entry_digest="edited")
    admit("b", "", "")
    output = [
        (item.entry_id, item.gpu, item.verdict, item.entry_digest[:1], item.count)
        for item in reports.verdict_counts(database)
    ]
    assert sorted(output) == [
        ("a", H100, "not-reproduced", "e", 1),
        ("a", H100, "verified", "e", 1),
        ("a", H100, "verified", "e", 3),
        ("b", "", "verified", "e", 1),
    ]
    standing = max(reports.verdict_counts(database), key=lambda item: item.count)
    assert (standing.driver, standing.torch, standing.fidelity) == ("550.54", "2.7.1+cu126", "hardware")
    assert standing.last == reports.page(database, entry="a", before=4)[0].received_at


def test_of_an_entry_as_many_counts_are_held_as_a_page_can_show(
    database: Database, admit: Admit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reports, "MAX_COUNTS", 3)
    for number in range(6):
        admit("a", H100, f"2.{number}")
        admit("b", H100, f"2.{number}")
    admit("a", H100, "2.1")
    counts = [item for item in reports.verdict_counts(database) if item.entry_id == "a"]
    assert len(counts) == 3
    assert ("2.1", 2) in [(item.torch, item.count) for item in counts]
    assert len(reports.verdict_counts(database)) == 6


def test_own_and_shared_reports_do_not_mix(database: Database, admit: Admit) -> None:
    reports.save(database, [report("own")])
    admit("shared")
    assert [item["id"] for item in reports.history(database)] == ["own"]
    assert entries(database) == [item.entry_id for item in reports.verdict_counts(database)] == ["shared"]
    assert reports.count(database) == 1


def test_a_report_without_a_machine_is_kept(database: Database, admit: Admit) -> None:
    admit("a", machine={"gpus": None, "driver": None, "torch": None})
    assert [(item.gpu, item.driver, item.torch) for item in reports.verdict_counts(database)] == [("", "", "")]


def test_numbers_beyond_those_of_a_database_find_what_they_should(database: Database, admit: Admit) -> None:
    admit("a")
    assert entries(database, before=10**30) == ["a"]
    assert entries(database, before=-(10**30)) == []
