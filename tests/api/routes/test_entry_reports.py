"""GET /v1/entries/ID/reports: those of the service and of its own machine, in the shared form."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from kb.sharing.shared_report import to_shared_report
from kb.store.database import Database
from kb.store.reports import history, save
from tests.support.console import ContentRoot, Kb
from tests.support.shared_reports import Post, local, report

pytest_plugins = ["tests.support.report_fixtures"]
pytestmark = pytest.mark.usefixtures("bearers")


def test_reports_of_this_machine_are_shown_without_what_names_it(client: httpx.Client, report_store: Database) -> None:
    save(report_store, [local("slow-disk", "2026-03-01T00:00:00+00:00", reason="in /home/alice/x")])
    response = client.get("/v1/entries/slow-disk/reports")
    (result,) = response.json()["reports"]
    assert (result["number"], result["received_at"]) == (None, None)
    assert result["machine"]["kernel"] == "6.8"
    for secret in ("5bce98f73f3e", "NCCL_DEBUG", "alice", "environment"):
        assert secret not in response.text
    assert client.get("/v1/reports").json()["reports"] == []


def test_reports_of_an_entry_come_newest_first_from_wherever_they_are(
    client: httpx.Client, post_report: Post, report_store: Database
) -> None:
    save(report_store, [local("slow-disk", f"2026-03-0{day}T00:00:00+00:00") for day in (1, 3)])
    post_report(report(started_at="2026-03-02T00:00:00Z"))
    post_report(report(id="broken-thing"), "another-key")
    document = client.get("/v1/entries/slow-disk/reports").json()
    assert document["id"] == "slow-disk"
    assert [item["started_at"][8:10] for item in document["reports"]] == ["03", "02", "01"]
    limited = client.get("/v1/entries/slow-disk/reports", params={"limit": 1}).json()["reports"]
    assert [item["started_at"][8:10] for item in limited] == ["03"]


def test_what_a_machine_sent_to_itself_is_one_report(
    client: httpx.Client, post_report: Post, report_store: Database
) -> None:
    """The store of `kb serve` is by default that of the user, where `kb verify --report` keeps the report as well."""
    save(report_store, [local("slow-disk", "2026-03-02T00:00:00.123456+00:00")])
    post_report(report(id="slow-disk", started_at="2026-03-02T00:00:00.123456Z"))
    (result,) = client.get("/v1/entries/slow-disk/reports").json()["reports"]
    assert result["number"]


def test_an_entry_never_verified_has_no_reports(client: httpx.Client) -> None:
    assert client.get("/v1/entries/slow-disk/reports").json() == {"id": "slow-disk", "reports": []}


def test_reports_outlive_their_entry(client: httpx.Client, report_store: Database) -> None:
    save(report_store, [local("gone", "2026-03-01T00:00:00+00:00")])
    (result,) = client.get("/v1/entries/gone/reports").json()["reports"]
    assert result["earlier_wording"] is None


def test_reports_of_an_unknown_entry_are_not_found(client: httpx.Client) -> None:
    response = client.get("/v1/entries/slow-dsk/reports")
    assert response.status_code == 404
    assert response.json()["nearest"][0] == "slow-disk"


def test_a_report_that_cannot_be_shown_is_logged_and_left_out(
    client: httpx.Client, post_report: Post, report_store: Database, caplog: pytest.LogCaptureFixture
) -> None:
    save(report_store, [local("slow-disk", "2026-03-01T00:00:00+00:00", fidelity="of another kb")])
    post_report(report())
    with report_store.writing() as session:
        session.execute(text("UPDATE report SET document = '{\"machine\": {}}' WHERE sender IS NOT NULL"))
    assert client.get("/v1/entries/slow-disk/reports").json()["reports"] == []
    assert caplog.text.count("is left out") == 2


def test_the_report_of_a_node_stays_the_same_on_its_way(
    client: httpx.Client, post_report: Post, kb: Kb, entries: ContentRoot, tmp_path: Path
) -> None:
    """The local store of the command holds the whole report; what the service shows of both is the same."""
    entries.incident("breaks-here")
    data = tmp_path / "node"
    kb("verify", "breaks-here", "--json", XDG_DATA_HOME=str(data))
    (whole,) = history(Database.open(data / "kb" / "reports.db"), "breaks-here")
    assert whole["arms"]["control"]["ranks"]
    sent = to_shared_report(whole).model_dump(mode="json")
    number = post_report(sent).json()["number"]
    document = client.get(f"/v1/reports/{number}").json()
    assert {name: document[name] for name in sent} == sent
