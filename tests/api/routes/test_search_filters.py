"""GET /v1/search with the filters of `kb search`, and with the parts of its scores."""

from __future__ import annotations

import httpx
import pytest

from tests.support.console import ContentRoot, Kb

pytest_plugins = ["tests.support.app_fixtures"]

QUESTION = "the thing broke on a slow disk"


def ids(client: httpx.Client, **params: str | list[str]) -> set[str]:
    response = client.get("/v1/search", params={"q": QUESTION, **params})
    assert response.status_code == 200, response.text
    return {hit["id"] for hit in response.json()["hits"]}


def test_filters_take_hits_away(client: httpx.Client) -> None:
    assert ids(client) == {"broken-thing", "slow-disk"}
    assert ids(client, tag="storage") == ids(client, framework="torch") == {"slow-disk"}
    assert ids(client, tag=["test", "storage"]) == {"slow-disk"}
    assert ids(client, framework=["storage", "torch"], status=["confirmed", "reported"]) == {"slow-disk"}
    assert ids(client, status="reported") == set()
    assert ids(client, area=["memory", "hardware"]) == {"slow-disk"}


def test_a_hit_keeps_its_score_under_a_filter(client: httpx.Client) -> None:
    whole = client.get("/v1/search", params={"q": QUESTION}).json()["hits"]
    (kept,) = client.get("/v1/search", params={"q": QUESTION, "tag": "storage"}).json()["hits"]
    assert kept in whole


@pytest.mark.parametrize(
    ("name", "value", "hint"),
    [
        ("tag", "storge", "nearest: storage"),
        ("framework", "pytorch", "nearest: torch"),
        ("status", "sure", "confirmed, disputed, reported"),
        ("status", "withdrawn", "kb list --status withdrawn"),
        ("area", "disks", "one of checkpoint, collectives, data"),
    ],
)
def test_what_no_entry_has_is_a_problem_with_the_nearest(
    client: httpx.Client, name: str, value: str, hint: str
) -> None:
    response = client.get("/v1/search", params={"q": QUESTION, name: value})
    assert response.status_code == 422
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert problem["type"] == "urn:kb:problem:usage-error"
    assert f"{name} {value!r}" in problem["detail"]
    assert hint in problem["hint"]


def test_why_is_what_the_command_says(client: httpx.Client, entries: ContentRoot, kb: Kb) -> None:
    printed = kb("search", QUESTION, "--why", "--json", "--limit", "1").json["hits"][0]
    hit = client.get("/v1/search", params={"q": QUESTION, "why": "true", "limit": 1}).json()["hits"][0]
    assert hit.keys() == printed.keys()
    assert hit["why"].keys() == printed["why"].keys()
    words = sum(item["score"] for item in hit["why"]["concepts"])
    assert words * hit["why"]["coverage"] + hit["why"]["signature"] == pytest.approx(hit["score"], abs=0.001)


def test_without_asking_a_hit_has_neither_reason_nor_judgement(client: httpx.Client) -> None:
    for hit in client.get("/v1/search", params={"q": QUESTION}).json()["hits"]:
        assert not {"why", "applicability"} & hit.keys()


def test_the_server_does_not_judge_by_its_own_versions(client: httpx.Client) -> None:
    description = client.get("/openapi.json").json()
    names = {item["name"] for item in description["paths"]["/v1/search"]["get"]["parameters"]}
    assert names == {"q", "limit", "tag", "framework", "status", "area", "why", "gpu", "torch"}
    assert all(
        "applicability" not in hit
        for hit in client.get("/v1/search", params={"q": QUESTION, "torch": "2.7"}).json()["hits"]
    )
