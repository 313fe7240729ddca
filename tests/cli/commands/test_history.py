"""`kb history`: what earlier verifications proved, newest first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import root_at
from kb.store.database import Database
from kb.store.reports import save
from kb.store.sqlite import default_path
from tests.support.console import ContentRoot, Kb


def report(entry_id: str, day: int, digest: str = "", verdict: str = "verified") -> dict[str, Any]:
    return {
        "id": entry_id,
        "verdict": verdict,
        "fidelity": "cpu",
        "started_at": f"2026-03-{day:02}T23:30:00+00:00",
        "duration_s": 12.34,
        "entry_digest": digest,
        "probe_digest": "",
        "kb_version": "0.1.0",
    }


@pytest.fixture
def kept(content: ContentRoot) -> ContentRoot:
    """Two entries; one was verified, edited and verified again."""
    content.entry("broken-thing")
    content.entry("slow-disk")
    digest = load_catalog([root_at(content.path)]).get("broken-thing").digest
    save(
        Database.open(),
        [
            report("broken-thing", 1, "of another text", "not-reproduced"),
            report("broken-thing", 2, digest),
            report("gone", 3),
        ],
    )
    return content


def test_it_shows_every_report_newest_first_with_its_marker(kb_process: Kb, kept: ContentRoot) -> None:
    ended = kb_process("history", TZ="CST-8")
    assert ended.code == 0
    assert ended.err == ""
    rows = ended.out.splitlines()
    assert [row.split()[:4] for row in rows] == [
        ["2026-03-04", "07:30", "gone", "verified"],
        ["2026-03-03", "07:30", "broken-thing", "verified"],
        ["2026-03-02", "07:30", "broken-thing", "not-reproduced"],
    ]
    assert [row.endswith("earlier wording") for row in rows] == [False, False, True]
    assert all("cpu" in row and "12.3 s" in row for row in rows)


def test_an_edit_marks_the_reports_from_before_it(kb: Kb, kept: ContentRoot) -> None:
    assert [item["earlier_wording"] for item in kb("history", "broken-thing", "--json").json["reports"]] == [
        False,
        True,
    ]
    kept.entry("broken-thing", title="Said in other words")
    assert [item["earlier_wording"] for item in kb("history", "broken-thing", "--json").json["reports"]] == [True, True]


def test_the_document_holds_the_reports_as_they_were_saved(kb: Kb, kept: ContentRoot) -> None:
    ended = kb("history", "--json", "--limit", "1")
    assert ended.json == {
        "schema": "kb.history.v1",
        "ok": True,
        "reports": [{**report("gone", 3), "earlier_wording": None}],
    }


def test_what_verify_proved_is_in_it(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    proved = kb("verify", "breaks", "--json").json
    (result,) = kb("history", "breaks", "--json").json["reports"]
    assert result["earlier_wording"] is False
    assert {**proved, "schema": "", "earlier_wording": False} == {**result, "schema": "", "ok": True}


def test_an_entry_without_reports_says_how_to_make_one(kb: Kb, kept: ContentRoot) -> None:
    ended = kb("history", "slow-disk")
    assert ended.code == 1
    assert "kb verify slow-disk" in ended.out
    assert kb("history", "slow-disk", "--json").json == {"schema": "kb.history.v1", "ok": True, "reports": []}


def test_looking_makes_no_store(kb: Kb, content: ContentRoot) -> None:
    ended = kb("history")
    assert ended.code == 1
    assert "kb verify" in ended.out
    assert not default_path().exists()


def test_an_unknown_entry_names_the_nearest(kb: Kb, kept: ContentRoot) -> None:
    ended = kb("history", "slow-dsik", "--json")
    assert ended.code == 2
    assert ended.json["error"]["type"] == "unknown-entry"
    assert "slow-disk" in ended.json["error"]["hint"]


def test_reports_of_an_entry_that_is_gone_are_still_shown(kb: Kb, kept: ContentRoot) -> None:
    assert kb("history", "gone").code == 0


@pytest.mark.parametrize("limit", ["0", "-1", "many"])
def test_a_senseless_limit_is_a_usage_error(kb: Kb, limit: str) -> None:
    assert kb("history", "--limit", limit).code == 2


def test_a_store_that_cannot_be_read_is_an_error_with_a_hint(kb: Kb, content: ContentRoot) -> None:
    default_path().parent.mkdir(parents=True)
    default_path().write_text("no database " * 100)
    ended = kb("history")
    assert ended.code == 5
    assert str(default_path()) in ended.err
    assert "hint:" in ended.err
    assert "Traceback" not in ended.err


def test_a_verdict_is_given_although_it_cannot_be_kept(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks")
    (tmp_path / "file").touch()
    ended = kb("verify", "breaks", XDG_DATA_HOME=str(tmp_path / "file"))
    assert ended.code == 0
    assert "verified" in ended.out
    assert "not saved" in ended.err
