"""The entries and their reports over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support import ContentRoot, Kb

from kb.store.database import Database
from kb.store.reports import history, save

pytest_plugins = ["served"]


def ids(client: httpx.Client, **filters: Any) -> list[str]:
    return [one["id"] for one in client.get("/v1/entries", params=filters).json()["entries"]]


def test_the_list_is_that_of_the_command(client: httpx.Client, kb: Kb) -> None:
    printed = [one for one in kb("list", "--json").json["entries"] if one["origin"] != "built-in"]
    assert client.get("/v1/entries").json()["entries"] == printed
    assert len(printed) == 2


def test_filters_narrow_the_list(client: httpx.Client) -> None:
    assert ids(client) == ["broken-thing", "slow-disk"]
    assert ids(client, tag="storage") == ["slow-disk"]
    assert ids(client, tag=["test", "storage"]) == ["slow-disk"]
    assert ids(client, tag=["test", "absent"]) == []
    assert ids(client, framework="TORCH") == ["slow-disk"]
    assert ids(client, status="withdrawn") == ["old-thing"]
    assert ids(client, status="reported") == []


def test_an_entry_is_that_of_the_command_but_for_files_of_this_machine(client: httpx.Client, kb: Kb) -> None:
    printed = kb("show", "slow-disk", "--json").json
    for name in ("schema", "ok", "probe_file"):
        del printed[name]
    response = client.get("/v1/entries/slow-disk")
    assert response.json() == printed
    assert response.headers["vary"] == "Accept"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("text/markdown", "text/markdown; charset=utf-8"),
        ("text/*", "text/markdown; charset=utf-8"),
        ("text/markdown;q=0.5, application/json", "application/json"),
        ("application/json;q=0.1, text/markdown;q=0.2", "text/markdown; charset=utf-8"),
        ("application/json;q=0, */*", "text/markdown; charset=utf-8"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "application/json"),
        ("TEXT/MARKDOWN; q=high", "text/markdown; charset=utf-8"),
        ("", "application/json"),
    ],
)
def test_accept_chooses_between_json_and_the_file(client: httpx.Client, accept: str, kind: str) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, kind)
    assert response.headers["vary"] == "Accept"


def test_markdown_is_the_file_as_it_is_written(client: httpx.Client, entries: ContentRoot) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": "text/markdown"})
    assert response.content == (entries.path / "entries" / "slow-disk.md").read_bytes()


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0, text/markdown;q=0", "text/html"])
def test_another_kind_is_not_acceptable(client: httpx.Client, accept: str) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": accept})
    assert response.status_code == 406
    assert response.headers["vary"] == "Accept"
    assert "text/markdown" in response.json()["detail"]


def report(entry_id: str, digest: str, started_at: str) -> dict[str, Any]:
    return {
        "id": entry_id,
        "title": "A title",
        "verdict": "verified",
        "reason": "because",
        "fidelity": "cpu",
        "started_at": started_at,
        "duration_s": 1.0,
        "entry_digest": digest,
        "probe_digest": "",
        "kb_version": "0.1.0",
        "arms": {"control": {"kind": "raised"}},
    }


def test_reports_come_newest_first_with_their_wording_judged(client: httpx.Client, store_path: Path) -> None:
    digest = client.get("/v1/entries/slow-disk").json()["digest"]
    now = report("slow-disk", digest, "2026-03-02T00:00:00+00:00")
    earlier = report("slow-disk", "another", "2026-03-01T00:00:00+00:00")
    save(Database.open(store_path), [now, earlier, report("broken-thing", "", "2026-03-03T00:00:00+00:00")])
    found = client.get("/v1/entries/slow-disk/reports").json()
    assert found == {
        "id": "slow-disk",
        "reports": [{**now, "earlier_wording": False}, {**earlier, "earlier_wording": True}],
    }
    assert len(client.get("/v1/entries/slow-disk/reports", params={"limit": 1}).json()["reports"]) == 1


def test_an_entry_never_verified_has_no_reports_and_no_store_is_made(client: httpx.Client, store_path: Path) -> None:
    assert client.get("/v1/entries/slow-disk/reports").json() == {"id": "slow-disk", "reports": []}
    assert not store_path.parent.exists()


def test_reports_outlive_their_entry(client: httpx.Client, store_path: Path) -> None:
    save(Database.open(store_path), [report("gone", "x", "2026-03-01T00:00:00+00:00")])
    (found,) = client.get("/v1/entries/gone/reports").json()["reports"]
    assert found["earlier_wording"] is None


def test_reports_of_an_unknown_entry_are_not_found(client: httpx.Client) -> None:
    response = client.get("/v1/entries/slow-dsk/reports")
    assert response.status_code == 404
    assert response.json()["nearest"][0] == "slow-disk"


def test_the_report_of_the_command_arrives(
    client: httpx.Client, store_path: Path, entries: ContentRoot, kb: Kb
) -> None:
    entries.incident("breaks-here")
    printed = kb("verify", "breaks-here", "--json", XDG_DATA_HOME=str(store_path.parent)).json
    saved = history(Database.open(store_path.parent / "kb" / "reports.db"), "breaks-here")
    save(Database.open(store_path), saved)
    (found,) = client.get("/v1/entries/breaks-here/reports").json()["reports"]
    assert {**found, "schema": "kb.verify.v1", "ok": True} == {**printed, "earlier_wording": None}
