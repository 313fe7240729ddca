"""Did an entry help? Counted by entry and GPU, and nothing of the reader is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import text

from kb.store import audit
from kb.store.database import Database

pytest_plugins = ["tests.support.app_fixtures"]


def say(client: httpx.Client, **members: Any) -> httpx.Response:
    return client.post("/v1/feedback", json={"entry": "slow-disk", "helped": True, **members})


def test_what_readers_say_is_counted_by_entry_and_gpu(client: httpx.Client) -> None:
    for helped, gpu in ((True, "H100"), (True, "H100"), (False, "H100"), (False, "A100")):
        assert say(client, helped=helped, gpu=gpu).status_code == 201
    say(client, entry="broken-thing")
    assert client.get("/v1/feedback").json() == {
        "feedback": [
            {"entry": "broken-thing", "gpu": "", "helped": 1, "not_helped": 0},
            {"entry": "slow-disk", "gpu": "A100", "helped": 0, "not_helped": 1},
            {"entry": "slow-disk", "gpu": "H100", "helped": 2, "not_helped": 1},
        ],
        "next": None,
    }
    (only,) = client.get("/v1/feedback", params={"entry": "broken-thing"}).json()["feedback"]
    assert only["entry"] == "broken-thing"


def test_a_comment_is_answered_and_kept_without_names_and_secrets(client: httpx.Client, store_path: Path) -> None:
    output = "bob@example.com says:\n\ttoken hf_abcdefghijklmnopqrstuvwxyz0123 in /scratch/team/x, and it helped"
    answered = say(client, comment=output, torch="2.7.0").json()
    assert answered["comment"].endswith("and it helped")
    with Database.open(store_path).reading() as session:
        assert session
        kept = session.execute(text("SELECT comment FROM feedback")).scalar_one()
    assert kept == answered["comment"]
    for secret in ("bob", "hf_abc", "scratch", "\n"):
        assert secret not in kept


def test_what_is_said_of_the_machine_names_nobody_either(client: httpx.Client) -> None:
    document = say(client, gpu="H100 of alice@example.com at 10.1.2.3", torch="/home/alice/torch").json()
    assert "H100" in document["gpu"]
    assert "alice" not in document["gpu"] + document["torch"]
    assert client.get("/v1/feedback").json()["feedback"][0]["gpu"] == document["gpu"]


def test_comments_are_read_by_who_cares_for_the_entries(client: httpx.Client, admin: dict[str, str]) -> None:
    for comment in ("first", "", "second <b>"):
        say(client, comment=comment, gpu="A100")
    assert client.get("/v1/feedback/comments").status_code == 401
    page = client.get("/v1/feedback/comments", params={"limit": 1}, headers=admin).json()
    rest = client.get("/v1/feedback/comments", params={"cursor": page["next"]}, headers=admin).json()
    result = [*page["comments"], *rest["comments"]]
    assert [(item["comment"], item["entry"], item["gpu"]) for item in result] == [
        ("second <b>", "slow-disk", "A100"),
        ("first", "slow-disk", "A100"),
    ]
    assert rest["next"] is None


def test_it_is_in_the_audit_log_under_the_number_of_its_request(client: httpx.Client, store_path: Path) -> None:
    number = say(client).headers["x-request-id"]
    (written,) = audit.page(Database.open(store_path))
    assert (written.actor, written.action, written.subject, written.request_id) == (
        "anonymous",
        "feedback.create",
        "entries/slow-disk",
        number,
    )


def test_an_entry_that_is_none_cannot_have_helped(client: httpx.Client) -> None:
    response = say(client, entry="slow-dsk")
    assert response.status_code == 404
    assert response.json()["nearest"][0] == "slow-disk"
    assert client.get("/v1/feedback").json()["feedback"] == []


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("entry", "../../etc/passwd"),
        ("helped", "yes"),
        ("helped", 1),
        ("gpu", "x" * 65),
        ("gpu", "a\x00b"),
        ("torch", "2\n7"),
        ("comment", "x" * 501),
        ("sender", "me"),
    ],
)
def test_what_is_no_feedback_is_refused_by_the_name_of_the_part(
    client: httpx.Client, member: str, value: object
) -> None:
    response = say(client, **{member: value})
    assert response.status_code == 422
    assert response.json()["errors"][0]["parameter"] == member


def test_counts_come_in_pages_that_join_to_the_whole(client: httpx.Client) -> None:
    for gpu in ("B200", "A100", "H100"):
        say(client, gpu=gpu)
    result: list[str] = []
    cursor: str | None = None
    while cursor is not None or not result:
        asked = {"limit": "2", **({"cursor": cursor} if cursor else {})}
        page = client.get("/v1/feedback", params=asked).json()
        result += [item["gpu"] for item in page["feedback"]]
        cursor = page["next"]
    assert result == ["A100", "B200", "H100"]


@pytest.mark.parametrize("query", ["entry=%00", "limit=0", "limit=501", "cursor=x"])
def test_a_question_that_makes_no_sense_is_refused(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/feedback?{query}").status_code == 422
