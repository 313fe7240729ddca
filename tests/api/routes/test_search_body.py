"""POST /v1/search answers as GET does; equal questions get equal bytes, until the content changes."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.search.query import LONGEST_TEXT
from kb.store import keys, reports
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import ContentRoot, wait_for

pytest_plugins = ["tests.support.app_fixtures"]

ANSWERS: Any = resolve_name("kb.api.state.response_cache:ResponseCache")  # by name: nothing imports a shell
SENT: Any = resolve_name("kb.api.state.response_cache:CachedResponse")
LIMITS: Any = resolve_name("kb.api.state.response_cache")
ASKED = "the thing broke: code 7"


def ask(client: httpx.Client, **question: Any) -> httpx.Response:
    return client.post("/v1/search", json=question)


@pytest.mark.parametrize(
    "question",
    [
        {"q": ASKED},
        {"q": "slow disk", "limit": 1},
        {"q": ASKED, "tag": ["test", "storage"], "status": ["confirmed"]},
        {"q": "保存 故意弄坏", "why": True},
        {"q": ASKED, "gpu": "H100", "torch": "2.7"},
        {"q": "zzqqxx"},
    ],
    ids=str,
)
def test_a_question_in_a_body_gets_the_answer_of_one_in_an_address(
    client: httpx.Client, question: dict[str, Any]
) -> None:
    in_address = client.get("/v1/search", params=question)
    in_body = ask(client, **question)
    assert in_body.status_code == in_address.status_code == 200
    assert in_body.headers["content-type"] == in_address.headers["content-type"] == "application/json"
    assert in_body.content == in_address.content


@pytest.mark.parametrize(
    "question",
    [
        {},
        {"q": ""},
        {"q": " \n"},
        {"q": "x" * (LONGEST_TEXT + 1)},
        {"q": "x", "limit": 0},
        {"q": "x", "limit": 51},
        {"q": "x", "gpu": "x" * 101},
        {"q": "x", "tag": ["nowhere"]},
        {"q": "x", "tag": ["test"] * 21},
    ],
    ids=lambda item: str(item)[:30],
)
def test_what_is_refused_in_an_address_is_refused_in_a_body(client: httpx.Client, question: dict[str, Any]) -> None:
    in_address, in_body = client.get("/v1/search", params=question), ask(client, **question)
    assert in_body.status_code == in_address.status_code == 422
    assert in_body.json()["type"] == in_address.json()["type"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"q"', b'{"q": "\\ud800"}', b'{"q": {"$ne": 1}}', b"\xff"])
def test_a_body_that_is_no_question_is_refused(client: httpx.Client, body: bytes) -> None:
    answer = client.post("/v1/search", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.headers["content-type"] == "application/problem+json"


def test_a_question_that_is_not_sent_as_json_is_told_how(client: httpx.Client) -> None:
    response = client.post("/v1/search", content=b'{"q": "thing"}', headers={"Content-Type": "text/plain"})
    assert response.status_code == 422
    assert "Content-Type: application/json" in response.json()["hint"]
    assert "hint" not in client.post("/v1/search", json={"q": ""}).json()


def test_a_client_that_has_the_answer_is_told_so(client: httpx.Client) -> None:
    first = client.get("/v1/search", params={"q": ASKED})
    again = client.get("/v1/search", params={"q": ASKED}, headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = client.get("/v1/search", params={"q": "slow disk"}, headers={"If-None-Match": first.headers["etag"]})
    assert other.status_code == 200


def test_the_answer_says_whether_it_is_one(client: httpx.Client) -> None:
    assert client.get("/v1/search", params={"q": ASKED}).json()["answered"] is True
    assert client.get("/v1/search", params={"q": "why is the sky blue in the evening"}).json()["answered"] is False


def test_new_content_is_not_answered_from_the_old(
    store_path: Path, entries: ContentRoot, request: pytest.FixtureRequest
) -> None:
    database = Database.open(store_path)
    database.prepare()
    admin = {"Authorization": f"Bearer {keys.new(database, 'admin', Scope.ADMIN)[1]}"}
    client: httpx.Client = request.getfixturevalue("client")

    def titles() -> list[str]:
        return [hit["title"] for hit in client.get("/v1/search", params={"q": "slow disk"}).json()["hits"]]

    assert "The disk is slow" in titles()
    path = entries.path / "entries" / "slow-disk.md"
    path.write_text(path.read_text().replace("The disk is slow", "The slow disk has a new name"))
    assert "The disk is slow" in titles()
    assert client.post("/v1/admin/reindex", headers=admin).status_code == 202
    wait_for(lambda: "The slow disk has a new name" in titles(), "the new content")


def shared(entry_id: str, digest: str, gpu: str, torch: str) -> dict[str, Any]:
    return {
        "id": entry_id,
        "verdict": "verified",
        "fidelity": "hardware",
        "started_at": "2026-03-01T08:30:00+00:00",
        "duration_s": 1.0,
        "entry_digest": digest,
        "probe_digest": "b" * 64,
        "kb_version": "0.1.0",
        "machine": {"gpus": [gpu], "driver": "570", "torch": torch},
    }


def test_a_fix_that_reports_verified_on_such_hardware_comes_first(client: httpx.Client, store_path: Path) -> None:
    def hits(**here: str) -> list[dict[str, Any]]:
        document: list[dict[str, Any]] = client.get("/v1/search", params={"q": ASKED, **here}).json()["hits"]
        return document

    first, second = [hit["id"] for hit in hits(gpu="H100")]
    digest = client.get(f"/v1/entries/{second}").json()["digest"]
    report = shared(second, digest, "NVIDIA H100 80GB HBM3", "2.7.1+cu126")
    reports.add_shared(Database.open(store_path), report, "node", "a-key", "a-digest")
    wait_for(lambda: hits(gpu="8 x H100")[0]["id"] == second, "the report to count")
    message = hits(gpu="H100", torch="2.7.0")[0]["verified_on"]
    assert (message["gpu"], message["torch"], message["reports"]) == ("NVIDIA H100 80GB HBM3", "2.7.1+cu126", 1)
    assert "H100" in message["reason"]
    for other in ({}, {"gpu": "A100"}):
        document = hits(**other)
        assert [hit["id"] for hit in document] == [first, second]
        assert all("verified_on" not in hit for hit in document)


def test_of_many_answers_the_last_are_kept_and_their_size_is_bounded(app: FastAPI, client: httpx.Client) -> None:
    content, kept = app.state.loading.result(), ANSWERS()
    assert kept.get(content, "first") is None
    for number in range(LIMITS.MOST + 10):
        kept.put(content, f"{number}", SENT(b"x", True, ""))
        kept.get(content, "0")
    assert kept.get(content, "0")
    assert kept.get(content, "5") is None
    assert kept.get(content, f"{LIMITS.MOST}")
    for number in range(3):
        kept.put(content, f"large {number}", SENT(b"x" * (LIMITS.MOST_BYTES // 2), True, ""))
    assert kept.get(content, "large 2")
    assert kept.get(content, "large 0") is None


def test_answers_of_another_content_are_forgotten(app: FastAPI, client: httpx.Client) -> None:
    content, kept = app.state.loading.result(), ANSWERS()
    other = copy.copy(content)
    kept.get(content, "q")
    kept.put(content, "q", SENT(b"old", True, ""))
    assert kept.get(content, "q").body == b"old"
    kept.put(other, "q", SENT(b"late", True, ""))
    assert kept.get(content, "q").body == b"old"
    assert kept.get(other, "q") is None
    assert kept.get(content, "q") is None


def test_an_answer_echoes_no_more_than_the_beginning_of_a_question(client: httpx.Client) -> None:
    answer = ask(client, q="a thing " * 900)
    assert len(answer.json()["query"]) == 1000
    assert json.loads(answer.content)["hits"]
