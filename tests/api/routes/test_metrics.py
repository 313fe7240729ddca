"""What Prometheus reads."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
from fastapi import FastAPI
from prometheus_client.parser import text_string_to_metric_families

from kb.store.database import Database
from tests.support.console import wait_for

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
Sample = tuple[str, tuple[tuple[str, str], ...]]


def samples(client: httpx.Client) -> dict[Sample, float]:
    """Value by name and labels."""
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def requests(samples: dict[Sample, float], **labels: str) -> float:
    return samples.get(("kb_requests_total", tuple(sorted(labels.items()))), 0.0)


def test_requests_are_counted_by_the_template_of_their_route(client: httpx.Client) -> None:
    for entry in ("slow-disk", "broken-thing", "no-such"):
        client.get(f"/v1/entries/{entry}")
    for path in ("/a", "/b", "/c"):
        client.get(path)
    client.request("BREW", "/d")
    client.get("/v1/search?q=thing")
    client.get("/static/nothing")
    result = samples(client)
    assert requests(result, route="/v1/search", method="GET", status="200") == 1
    assert requests(result, route="/static/{name}", method="GET", status="404") == 1
    assert requests(result, route="/v1/entries/{id}", method="GET", status="200") == 2
    assert requests(result, route="/v1/entries/{id}", method="GET", status="404") == 1
    assert requests(result, route="-", method="GET", status="404") == 3
    assert requests(result, route="-", method="other", status="404") == 1
    assert result["kb_request_seconds_count", (("route", "/v1/entries/{id}"),)] == 3


def test_a_client_cannot_make_up_labels(client: httpx.Client) -> None:
    def names() -> set[Sample]:
        return {name for name in samples(client) if not name[0].endswith("_created")}

    for number in range(3):
        client.request(f"VERB{number}", f"/path/{number}", headers={"X-Request-ID": f"request-{number}"})
    before = names() and names()  # the first reading is counted in the second
    for number in range(3, 30):
        client.request(f"VERB{number}", f"/path/{number}?q={number}", headers={"X-Request-ID": f"request-{number}"})
    assert names() == before


def test_it_says_what_is_served_and_whether_the_database_answers(
    client: httpx.Client, app: FastAPI, store_path: Path
) -> None:
    wait_for(lambda: samples(client).get(("kb_database_up", ())) == 1, "the first look at the database")
    result = samples(client)
    assert result["kb_content_entries", ()] == len(app.state.loading.result().catalog) == 3
    assert result["kb_content_generation", ()] == 0
    assert result["kb_reports", ()] == 0
    store_path.parent.mkdir(exist_ok=True)
    store_path.write_text("no database " * 100)
    wait_for(lambda: samples(client)["kb_database_up", ()] == 0, "the second look at the database")
    assert client.get("/v1/search?q=thing").status_code == 200


def test_two_applications_in_one_process_count_for_themselves(make_app: Callable[..., FastAPI], serve: Serve) -> None:
    with serve(make_app()) as item, serve(make_app()) as other:
        item.get("/nowhere")
        assert requests(samples(item), route="-", method="GET", status="404") == 1
        assert requests(samples(other), route="-", method="GET", status="404") == 0


def test_reports_are_counted(make_app: Callable[..., FastAPI], serve: Serve, store_path: Path) -> None:
    document = {
        "id": "slow-disk",
        "verdict": "verified",
        "fidelity": "cpu",
        "started_at": "2026-03-01T08:30:00+00:00",
        "duration_s": 1.0,
        "entry_digest": "a" * 64,
        "probe_digest": "b" * 64,
        "kb_version": "0.1.0",
        "machine": {"gpus": ["NVIDIA H100"], "driver": "550", "torch": "2.7"},
    }
    from kb.store import reports

    with Database.open(store_path) as store:
        reports.add_shared(store, document, "k7v2m9qa", "idempotency-1", "c" * 64)
    with serve(make_app()) as client:
        wait_for(lambda: samples(client).get(("kb_reports", ())) == 1, "the report to be counted")
        assert [standing.gpu for standing in client._transport.app.state.snapshot.verdict_counts] == ["NVIDIA H100"]  # type: ignore[attr-defined]
