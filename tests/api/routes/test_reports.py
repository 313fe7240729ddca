"""Reports over HTTP: kept once, shown in the shared form, found by entry, GPU, torch and verdict."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from kb.sharing.shared_report import to_shared_report
from kb.store import audit, keys
from kb.store.database import Database
from kb.store.keys import Scope
from kb.store.reports import history, page, save
from tests.support.console import ContentRoot, Kb, ruin
from tests.support.ready_store import ready_store

pytest_plugins = ["tests.support.app_fixtures"]

Post = Callable[..., httpx.Response]
KEY = "a-key-of-8-or-more"


def report(**members: Any) -> dict[str, Any]:
    """A report as a node shares it."""
    return {
        "id": "slow-disk",
        "title": "The disk is slow",
        "verdict": "verified",
        "reason": "because",
        "fidelity": "hardware",
        "entry_digest": "a" * 64,
        "probe_digest": "b" * 64,
        "started_at": "2026-03-01T08:30:00Z",
        "duration_s": 1.5,
        "kb_version": "0.1.0",
        "machine": {"gpus": ["NVIDIA H100 80GB HBM3"] * 2, "driver": "570.86.15", "torch": "2.7.1+cu126"},
        **members,
    }


@pytest.fixture
def database(store_path: Path) -> Database:
    return Database.open(ready_store(store_path))


@pytest.fixture
def bearers(database: Database) -> dict[str, str]:
    """What to send as Authorization: of two nodes and of somebody who only reads."""
    scopes = {"node": Scope.REPORT, "other": Scope.REPORT, "reader": Scope.READ}
    return {name: f"Bearer {keys.new(database, name, scope)[1]}" for name, scope in scopes.items()}


@pytest.fixture
def client(bearers: dict[str, str], client: httpx.Client) -> httpx.Client:
    """A client of a service that knows the keys when it starts."""
    return client


@pytest.fixture
def post(client: httpx.Client, bearers: dict[str, str]) -> Post:
    def send(document: dict[str, Any] | bytes, key: str = KEY, **headers: str) -> httpx.Response:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        given = {
            "Content-Type": "application/json",
            "Idempotency-Key": key,
            "Authorization": bearers["node"],
            **headers,
        }
        return client.post("/v1/reports", content=body, headers=given)

    return send


def test_a_report_is_kept_and_is_where_its_receipt_says(client: httpx.Client, post: Post) -> None:
    response = post(report())
    assert response.status_code == 201
    assert response.json() == {"number": 1, "id": "slow-disk", "verdict": "verified"}
    document = client.get(response.headers["location"]).json()
    assert document["number"] == 1
    assert document["received_at"].endswith("Z")
    assert document["machine"]["gpus"] == ["NVIDIA H100 80GB HBM3"] * 2
    assert {name: document[name] for name in report() if name != "machine"} == {
        name: value for name, value in report().items() if name != "machine"
    }


def test_sent_again_it_is_not_kept_again(client: httpx.Client, post: Post) -> None:
    first, second = post(report()), post(dict(reversed(report().items())))
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.json() == first.json()
    assert "idempotent-replayed" not in first.headers
    assert second.headers["idempotent-replayed"] == "true"
    assert len(client.get("/v1/reports").json()["reports"]) == 1


def test_at_the_same_time_it_is_kept_once(client: httpx.Client, post: Post) -> None:
    with ThreadPoolExecutor(8) as senders:
        answers = list(senders.map(lambda _: post(report()), range(16)))
    assert sorted(answer.status_code for answer in answers) == [200] * 15 + [201]
    assert {answer.json()["number"] for answer in answers} == {1}


def test_a_key_used_for_another_report_is_refused(client: httpx.Client, post: Post) -> None:
    post(report())
    response = post(report(verdict="inverted"))
    assert response.status_code == 422
    assert response.json()["type"] == "urn:kb:problem:key-reused"
    (kept,) = client.get("/v1/reports").json()["reports"]
    assert kept["verdict"] == "verified"


def test_two_senders_may_make_up_the_same_key(post: Post, bearers: dict[str, str]) -> None:
    assert post(report()).json()["number"] == 1
    assert post(report(verdict="inverted"), Authorization=bearers["other"]).json()["number"] == 2


@pytest.mark.parametrize("key", ["short", "x" * 129, "has blank", ""])
def test_a_key_that_could_not_be_told_apart_is_refused(post: Post, key: str) -> None:
    response = post(report(), key)
    assert response.status_code == 422
    assert response.json()["errors"][0]["parameter"] == "Idempotency-Key"


def test_without_a_key_of_its_own_it_is_refused(client: httpx.Client, bearers: dict[str, str]) -> None:
    response = client.post("/v1/reports", json=report(), headers={"Authorization": bearers["node"]})
    assert response.status_code == 422
    assert response.json()["errors"] == [{"parameter": "Idempotency-Key", "detail": "Field required"}]


def test_who_may_only_read_may_not_report(client: httpx.Client, bearers: dict[str, str], post: Post) -> None:
    assert post(report(), Authorization=bearers["reader"]).status_code == 403
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
    client: httpx.Client, post: Post, body: bytes, named: str
) -> None:
    response = post(body)
    assert response.status_code == 422
    assert response.json()["type"] == "urn:kb:problem:invalid-request"
    assert response.json()["errors"][0]["parameter"] == named
    assert client.get("/v1/reports").json()["reports"] == []


def test_another_media_type_is_refused(post: Post) -> None:
    response = post(report(), **{"Content-Type": "text/plain"})
    assert response.status_code == 415
    assert "application/json" in response.json()["detail"]


def test_a_body_of_more_than_the_largest_report_is_refused(client: httpx.Client, post: Post) -> None:
    assert post(b" " * (64 << 10) + b"{}").status_code == 413
    assert client.get("/v1/reports").json()["reports"] == []


def test_names_that_a_node_did_not_hide_are_hidden_here(client: httpx.Client, post: Post) -> None:
    post(report(reason="user bob@example.com read /scratch/secret/plan"))
    (result,) = client.get("/v1/reports").json()["reports"]
    assert "bob" not in result["reason"]
    assert "secret" not in result["reason"]


def test_markup_is_data(client: httpx.Client, post: Post) -> None:
    evil = "<script>alert(1)</script> {{7*7}} ${7*7} '; DROP TABLE report; --"
    post(report(reason=evil, machine={"gpus": [evil[:40]], "torch": "2.7.1' OR '1'='1"}))
    response = client.get("/v1/reports", params={"gpu": "' OR 1=1 --"})
    assert response.json()["reports"] == []
    response = client.get("/v1/reports")
    assert response.headers["content-type"] == "application/json"
    assert response.json()["reports"][0]["reason"] == evil


@pytest.mark.parametrize(
    ("filters", "numbers"),
    [
        ({}, [4, 3, 2, 1]),
        ({"entry": "slow-disk"}, [3, 2, 1]),
        ({"entry": "gone-thing"}, [4]),
        ({"entry": "unheard-of"}, []),
        ({"gpu": "h100"}, [4, 1]),
        ({"gpu": "100"}, [4, 2, 1]),
        ({"gpu": "%"}, []),
        ({"torch": "2.7"}, [4, 1]),
        ({"torch": "2.7.1+cu126"}, [4, 1]),
        ({"torch": "2"}, [4, 2, 1]),
        ({"verdict": "inverted"}, [2]),
        ({"verdict": "verified", "gpu": "H100", "entry": "slow-disk"}, [1]),
    ],
    ids=str,
)
def test_filters_narrow_the_list(client: httpx.Client, post: Post, filters: dict[str, str], numbers: list[int]) -> None:
    post(report(), "key-number-1")
    post(report(verdict="inverted", machine={"gpus": ["NVIDIA A100"], "torch": "2.6.0"}), "key-number-2")
    post(report(machine={}), "key-number-3")
    post(report(id="gone-thing"), "key-number-4")
    document = client.get("/v1/reports", params=filters).json()["reports"]
    assert [item["number"] for item in document] == numbers


def test_a_list_comes_in_pages_and_a_new_report_moves_none(client: httpx.Client, post: Post) -> None:
    for number in range(5):
        post(report(), f"key-number-{number}")
    first = client.get("/v1/reports", params={"limit": 2}).json()
    post(report(), "key-number-5")
    second = client.get("/v1/reports", params={"limit": 2, "cursor": first["next"]}).json()
    third = client.get("/v1/reports", params={"limit": 2, "cursor": second["next"]}).json()
    pages = [[item["number"] for item in result["reports"]] for result in (first, second, third)]
    assert pages == [[5, 4], [3, 2], [1]]
    assert third["next"] is None


def test_a_cursor_of_another_list_is_refused(client: httpx.Client) -> None:
    cursor = client.get("/v1/entries", params={"limit": 1}).json()["next"]
    assert client.get("/v1/reports", params={"cursor": cursor}).status_code == 422


@pytest.mark.parametrize(
    "query",
    ["limit=0", "limit=101", "verdict=confirmed", "entry=%00", "gpu=%00", "torch=%0a", f"gpu={'x' * 65}", "cursor=1"],
)
def test_a_question_that_makes_no_sense_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/reports?{query}").status_code == 422


@pytest.mark.parametrize(("number", "status"), [("1", 404), ("0", 422), ("9" * 30, 422), ("x", 422), ("-1", 422)])
def test_a_report_that_is_not_there_is_not_found(client: httpx.Client, number: str, status: int) -> None:
    assert client.get(f"/v1/reports/{number}").status_code == status


def test_reports_say_whether_entry_and_probe_have_changed_since(client: httpx.Client, post: Post) -> None:
    digest = client.get("/v1/entries/slow-disk").json()["digest"]
    post(report(), "key-number-1")
    post(report(id="gone-thing"), "key-number-2")
    post(report(entry_digest=digest, probe_digest=""), "key-number-3")  # these entries have no probe
    document = client.get("/v1/reports").json()["reports"]
    assert {item["number"]: (item["earlier_wording"], item["earlier_probe"]) for item in document} == {
        1: (True, True),
        2: (None, None),
        3: (False, False),
    }


def test_the_report_of_a_node_stays_the_same_on_its_way(
    client: httpx.Client, post: Post, kb: Kb, entries: ContentRoot, tmp_path: Path
) -> None:
    """The local store of the command holds the whole report; what the service shows of both is the same."""
    entries.incident("breaks-here")
    data = tmp_path / "node"
    kb("verify", "breaks-here", "--json", XDG_DATA_HOME=str(data))
    (whole,) = history(Database.open(data / "kb" / "reports.db"), "breaks-here")
    assert whole["arms"]["control"]["ranks"]
    sent = to_shared_report(whole).model_dump(mode="json")
    number = post(sent).json()["number"]
    document = client.get(f"/v1/reports/{number}").json()
    assert {name: document[name] for name in sent} == sent


def local(entry_id: str, started_at: str, **members: Any) -> dict[str, Any]:
    """A report as `kb verify` keeps it in the store of its own machine."""
    environment = {"host": {"id": "5bce98f73f3e", "kernel": "6.8"}, "variables": {"NCCL_DEBUG": "INFO"}}
    plain = {name: value for name, value in report(id=entry_id).items() if name != "machine"}
    return {**plain, "started_at": started_at, "environment": environment, "params": {}, **members}


def test_reports_of_this_machine_are_shown_without_what_names_it(client: httpx.Client, database: Database) -> None:
    save(database, [local("slow-disk", "2026-03-01T00:00:00+00:00", reason="in /home/alice/x")])
    response = client.get("/v1/entries/slow-disk/reports")
    (result,) = response.json()["reports"]
    assert (result["number"], result["received_at"]) == (None, None)
    assert result["machine"]["kernel"] == "6.8"
    for secret in ("5bce98f73f3e", "NCCL_DEBUG", "alice", "environment"):
        assert secret not in response.text
    assert client.get("/v1/reports").json()["reports"] == []


def test_reports_of_an_entry_come_newest_first_from_wherever_they_are(
    client: httpx.Client, post: Post, database: Database
) -> None:
    save(database, [local("slow-disk", f"2026-03-0{day}T00:00:00+00:00") for day in (1, 3)])
    post(report(started_at="2026-03-02T00:00:00Z"))
    post(report(id="broken-thing"), "another-key")
    document = client.get("/v1/entries/slow-disk/reports").json()
    assert document["id"] == "slow-disk"
    assert [item["started_at"][8:10] for item in document["reports"]] == ["03", "02", "01"]
    limited = client.get("/v1/entries/slow-disk/reports", params={"limit": 1}).json()["reports"]
    assert [item["started_at"][8:10] for item in limited] == ["03"]


def test_what_a_machine_sent_to_itself_is_one_report(client: httpx.Client, post: Post, database: Database) -> None:
    """The store of `kb serve` is by default that of the user, where `kb verify --report` keeps the report as well."""
    save(database, [local("slow-disk", "2026-03-02T00:00:00.123456+00:00")])
    post(report(id="slow-disk", started_at="2026-03-02T00:00:00.123456Z"))
    (result,) = client.get("/v1/entries/slow-disk/reports").json()["reports"]
    assert result["number"]


def test_an_entry_never_verified_has_no_reports(client: httpx.Client) -> None:
    assert client.get("/v1/entries/slow-disk/reports").json() == {"id": "slow-disk", "reports": []}


def test_reports_outlive_their_entry(client: httpx.Client, database: Database) -> None:
    save(database, [local("gone", "2026-03-01T00:00:00+00:00")])
    (result,) = client.get("/v1/entries/gone/reports").json()["reports"]
    assert result["earlier_wording"] is None


def test_reports_of_an_unknown_entry_are_not_found(client: httpx.Client) -> None:
    response = client.get("/v1/entries/slow-dsk/reports")
    assert response.status_code == 404
    assert response.json()["nearest"][0] == "slow-disk"


def test_a_report_that_cannot_be_shown_is_logged_and_left_out(
    client: httpx.Client, post: Post, database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    save(database, [local("slow-disk", "2026-03-01T00:00:00+00:00", fidelity="of another kb")])
    post(report())
    with database.writing() as session:
        session.execute(text("UPDATE report SET document = '{\"machine\": {}}' WHERE sender IS NOT NULL"))
    assert client.get("/v1/entries/slow-disk/reports").json()["reports"] == []
    assert caplog.text.count("is left out") == 2


def test_a_write_is_in_the_audit_log_under_the_number_of_its_request(post: Post, database: Database) -> None:
    number = post(report(), **{"X-Request-ID": "request-of-a-test"}).json()["number"]
    post(report())
    (written,) = [item for item in audit.page(database, 100, None) if item.action == "report.create"]
    assert (written.subject, written.request_id) == (f"reports/{number}", "request-of-a-test")
    assert len(page(database)) == 1


def test_while_the_store_is_away_a_report_is_to_be_sent_again(
    client: httpx.Client, post: Post, store_path: Path
) -> None:
    assert post(report()).status_code == 201
    ruin(store_path)
    response = post(report(), "another-key")
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["type"] == "urn:kb:problem:store-unavailable"
