"""POST /v1/reports: a report is kept once, or refused by the name of the part that is wrong."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from kb.store import audit
from kb.store.database import Database
from kb.store.reports import page
from tests.support.console import ruin
from tests.support.shared_reports import KEY, Post, report

pytest_plugins = ["tests.support.report_fixtures"]
pytestmark = pytest.mark.usefixtures("bearers")


def test_a_report_is_kept_and_is_where_its_receipt_says(client: httpx.Client, post_report: Post) -> None:
    response = post_report(report())
    assert response.status_code == 201
    assert response.json() == {"number": 1, "id": "slow-disk", "verdict": "verified"}
    document = client.get(response.headers["location"]).json()
    assert document["number"] == 1
    assert document["received_at"].endswith("Z")
    assert document["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert {name: document[name] for name in report() if name != "machine"} == {
        name: value for name, value in report().items() if name != "machine"
    }


def test_sent_again_it_is_not_kept_again(client: httpx.Client, post_report: Post) -> None:
    first, second = post_report(report()), post_report(dict(reversed(report().items())))
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert len(client.get("/v1/reports").json()["reports"]) == 1


def test_at_the_same_time_it_is_kept_once(client: httpx.Client, post_report: Post) -> None:
    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda _: post_report(report()), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
    assert {answer.json()["number"] for answer in answers} == {1}


def test_a_key_used_for_another_report_is_refused(client: httpx.Client, post_report: Post) -> None:
    post_report(report())
    response = post_report(report(verdict="inverted"))
    assert response.status_code == 422
    assert response.json()["type"] == "urn:kb:problem:key-reused"
    (kept,) = client.get("/v1/reports").json()["reports"]
    assert kept["verdict"] == "verified"


def test_two_senders_may_make_up_the_same_key(post_report: Post, bearers: dict[str, str]) -> None:
    assert post_report(report()).json()["number"] == 1
    assert post_report(report(verdict="inverted"), Authorization=bearers["other"]).json()["number"] == 2


@pytest.mark.parametrize("key", ["short", "x" * 129, "has blank", ""])
def test_a_key_that_could_not_be_told_apart_is_refused(post_report: Post, key: str) -> None:
    response = post_report(report(), key)
    assert response.status_code == 422
    assert response.json()["errors"][0]["parameter"] == "Idempotency-Key"


def test_without_a_key_of_its_own_it_is_refused(client: httpx.Client, bearers: dict[str, str]) -> None:
    response = client.post("/v1/reports", json=report(), headers={"Authorization": bearers["node"]})
    assert response.status_code == 422
    assert response.json()["errors"] == [{"parameter": "Idempotency-Key", "detail": "Field required"}]


def test_who_may_only_read_may_not_report(client: httpx.Client, bearers: dict[str, str], post_report: Post) -> None:
    assert post_report(report(), Authorization=bearers["reader"]).status_code == 403
    anonymous = client.post("/v1/reports", json=report(), headers={"Idempotency-Key": KEY})
    assert anonymous.status_code == 401
    assert anonymous.headers["www-authenticate"] == "Bearer"
    assert client.get("/v1/reports").json()["reports"] == []


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b'"\\ud800"', "body"),
        (b"[" * 60_000, "body"),
        (b"\xff\xfe", "body"),
        (json.dumps(report(id="../../etc/passwd")).encode(), "id"),
        (json.dumps(report(entry_digest="<script>")).encode(), "entry_digest"),
        (json.dumps(report(host="gpu-node-17")).encode(), "host"),
        (json.dumps(report(reason="x" * 501)).encode(), "reason"),
        (json.dumps(report(duration_s="1")).encode(), "duration_s"),
        (json.dumps(report(started_at="2026-03-01")).encode(), "started_at"),
        (json.dumps(report(duration_s=float("nan"))).encode(), "duration_s"),
    ],
    ids=lambda item: item[:20] if isinstance(item, bytes) else item,
)
def test_what_is_no_report_is_refused_by_the_name_of_the_part(
    client: httpx.Client, post_report: Post, body: bytes, named: str
) -> None:
    response = post_report(body)
    assert response.status_code == 422
    assert response.json()["type"] == "urn:kb:problem:invalid-request"
    assert response.json()["errors"][0]["parameter"] == named
    assert client.get("/v1/reports").json()["reports"] == []


def test_another_media_type_is_refused(post_report: Post) -> None:
    response = post_report(report(), **{"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["detail"]


def test_a_body_of_more_than_the_largest_report_is_refused(client: httpx.Client, post_report: Post) -> None:
    assert post_report(b" " * (64 << 10) + b"{}").status_code == 413
    assert client.get("/v1/reports").json()["reports"] == []


def test_names_that_a_node_did_not_hide_are_hidden_here(client: httpx.Client, post_report: Post) -> None:
    post_report(report(reason="user bob@example.com read /scratch/secret/plan"))
    (result,) = client.get("/v1/reports").json()["reports"]
    assert "bob" not in result["reason"]
    assert "secret" not in result["reason"]


def test_a_write_is_in_the_audit_log_under_the_number_of_its_request(post_report: Post, report_store: Database) -> None:
    number = post_report(report(), **{"X-Request-ID": "request-of-a-test"}).json()["number"]
    post_report(report())
    (written,) = [item for item in audit.page(report_store, 100, None) if item.action == "report.create"]
    assert (written.subject, written.request_id) == (f"reports/{number}", "request-of-a-test")
    assert len(page(report_store)) == 1


def test_while_the_store_is_away_a_report_is_to_be_sent_again(
    client: httpx.Client, post_report: Post, store_path: Path
) -> None:
    assert post_report(report()).status_code == 201
    ruin(store_path)
    response = post_report(report(), "another-key")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["type"] == "urn:kb:problem:store-unavailable"
