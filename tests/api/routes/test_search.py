"""GET /v1/search answers as `kb search` does, to any number of clients at once."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from kb.content.roots import builtin_root, root_at
from kb.search.index_cache import open_index
from kb.search.query import LONGEST_TEXT
from tests.support.console import GENEROUS_S, ContentRoot, Kb

pytest_plugins = ["tests.support.app_fixtures"]


def test_its_hits_are_those_of_the_command(client: httpx.Client, entries: ContentRoot, kb: Kb) -> None:
    asked = "the thing broke: code 9"
    printed = kb("search", asked, "--json").json
    document = client.get("/v1/search", params={"q": asked}).json()
    ours = [hit for hit in printed["hits"] if hit["origin"] != "built-in"]
    assert [hit.keys() for hit in document["hits"]] == [hit.keys() for hit in ours]
    assert [hit["id"] for hit in document["hits"]] == [hit["id"] for hit in ours]
    assert document["query"] == printed["query"] == asked


def test_a_hit_says_why_it_matched(client: httpx.Client) -> None:
    (hit,) = client.get("/v1/search", params={"q": "slow disk", "limit": 1}).json()["hits"]
    assert hit["id"] == "slow-disk"
    assert {"slow", "disk"} <= set(hit["matched"])
    assert hit["origin"]


def test_chinese_finds(client: httpx.Client) -> None:
    assert client.get("/v1/search", params={"q": "故意弄坏"}).json()["hits"]


def test_nothing_found_is_an_answer(client: httpx.Client) -> None:
    response = client.get("/v1/search", params={"q": "zzqqxx"})
    assert response.status_code == 200
    assert response.json()["hits"] == []


def test_a_withdrawn_entry_is_no_hit(client: httpx.Client) -> None:
    hits = client.get("/v1/search", params={"q": "thing that was never true", "limit": 50}).json()["hits"]
    assert "old-thing" not in {hit["id"] for hit in hits}


def test_the_longest_query_is_answered_and_a_longer_one_refused(client: httpx.Client) -> None:
    longest = ("a thing " * LONGEST_TEXT)[:LONGEST_TEXT]
    assert client.get("/v1/search", params={"q": longest}).status_code == 200
    refused = client.get("/v1/search", params={"q": longest + "x"})
    assert refused.status_code == 422
    assert refused.json()["errors"][0]["parameter"] == "q"
    assert len(refused.text) < 1000, "the query is not sent back"


@pytest.mark.parametrize(
    "asked", ["* OR [a TO z]", "x~5", "((((", '"', "%00\x00", "\U0001f4a5", "' OR 1=1", "../../etc/passwd"]
)
def test_operators_and_odd_characters_are_only_text(client: httpx.Client, asked: str) -> None:
    assert client.get("/v1/search", params={"q": asked}).status_code == 200


def test_clients_at_the_same_time_get_the_answers_of_one_alone(client: httpx.Client, app: FastAPI) -> None:
    words = (builtin_root().entries / "checkpoint-save-allgather-timeout.md").read_text().split()
    questions = [" ".join(words[start : start + 40]) for start in range(0, 400, 20)] + ["slow disk", "故意弄坏的"]
    alone = {asked: client.get("/v1/search", params={"q": asked}).json() for asked in questions}

    async def together() -> list[tuple[str, object]]:
        async def ask(asked: str) -> tuple[str, object]:
            return asked, (await http.get("/v1/search", params={"q": asked})).json()

        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            return await asyncio.gather(*(ask(asked) for asked in questions * 10))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads change places far more often than usual: what can mix, mixes
    try:
        answers = asyncio.run(together())
    finally:
        sys.setswitchinterval(interval)
    assert all(answer == alone[asked] for asked, answer in answers)


def test_what_was_opened_stays_valid_when_the_index_is_rebuilt(client: httpx.Client, entries: ContentRoot) -> None:
    before = client.get("/v1/search", params={"q": "slow disk"}).json()
    (entries.path / "entries" / "broken-thing.md").unlink()
    entries.entry("slow-disk", title="Another title altogether")
    with open_index((root_at(entries.path),), force=True) as rebuilt:
        assert len(rebuilt) == 2
    assert client.get("/v1/search", params={"q": "slow disk"}).json() == before
    assert client.get("/v1/entries/broken-thing").status_code == 200
    markdown = client.get("/v1/entries/slow-disk", headers={"Accept": "text/markdown"}).text
    assert "The disk is slow" in markdown


DEFAULT = """
import asyncio, json, sys
from kb.api.app import create_app

async def main():
    async with app.router.lifespan_context(app):
        answer = await app.state.loading.result().search("ALLGATHER timeout save", 1)
        heavy = {"torch", "kb.harness.launcher", "kb.verify.runner", "kb.verify.plan", "kb.runtime.worker"} & sys.modules.keys()
        print(json.dumps([answer.hits[0].id, list(heavy)]))

app = create_app()
asyncio.run(main())
"""


def test_by_default_it_serves_the_built_in_entries_and_nothing_that_starts_a_process(tmp_path: Path) -> None:
    output = subprocess.check_output([sys.executable, "-c", DEFAULT], cwd=tmp_path, timeout=GENEROUS_S)
    assert json.loads(output) == ["checkpoint-save-allgather-timeout", []]


def test_a_question_that_comes_again_gets_the_same_answer_and_a_wrong_one_the_same_problem(
    client: httpx.Client,
) -> None:
    answers = [client.get("/v1/search?q=the+thing+broke&limit=2") for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1
    assert len({answer.headers["x-request-id"] for answer in answers}) == 3
    again = client.get("/v1/search?q=the+thing+broke&limit=2", headers={"if-none-match": answers[0].headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert client.get("/v1/search?q=the+thing+broke&limit=1").json()["hits"] == answers[0].json()["hits"][:1]
    assert [client.get("/v1/search?q=broke&limit=0").status_code for _ in range(2)] == [422, 422]
