"""Questions without a good answer are counted for authors, without names and secrets, and no reader waits for that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest

from kb.store import audit, gaps, keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import wait_for
from tests.support.ready_store import ready_store

pytest_plugins = ["tests.support.app_fixtures"]

UNANSWERED: Any = resolve_name("kb.api.state.gap_queue:GapQueue")  # by name: nothing imports a shell
LIMITS: Any = resolve_name("kb.api.state.gap_queue")
UNKNOWN = "why is the sky blue in the evening"
Bearers = dict[str, dict[str, str]]


@pytest.fixture
def database(store_path: Path) -> Iterator[Database]:
    with Database.open(ready_store(store_path)) as result:
        yield result


@pytest.fixture
def bearers(database: Database) -> Bearers:
    return {
        scope: {"Authorization": f"Bearer {keys.new(database, scope, Scope(scope))[1]}"}
        for scope in ("read", "report", "admin")
    }


@pytest.fixture
def client(bearers: Bearers, client: httpx.Client) -> httpx.Client:
    """A client of a service that knows the keys when it starts."""
    return client


@pytest.fixture
def listed(client: httpx.Client) -> Callable[[], list[dict[str, Any]]]:
    def gaps() -> list[dict[str, Any]]:
        page: list[dict[str, Any]] = client.get("/v1/gaps").json()["gaps"]
        return page

    return gaps


Listed = Callable[[], list[dict[str, Any]]]


def test_a_question_without_a_good_answer_is_counted_each_time(client: httpx.Client, listed: Listed) -> None:
    client.get("/v1/search", params={"q": UNKNOWN})
    client.post("/v1/search", json={"q": f" {UNKNOWN}\n"})
    client.get("/v1/context", params={"q": UNKNOWN})
    wait_for(lambda: [item["count"] for item in listed()] == [3], "three questions to be counted as one")
    (gap,) = listed()
    assert (gap["kind"], gap["text"]) == ("search", UNKNOWN)
    assert gap["first"] <= gap["last"]
    assert gap["last"].endswith("Z")


def test_what_is_answered_or_filtered_is_no_gap(client: httpx.Client, listed: Listed) -> None:
    client.get("/v1/search", params={"q": "the thing broke: code 7"})
    client.get("/v1/search", params={"q": "another question altogether", "tag": "storage"})
    client.get("/v1/search", params={"q": UNKNOWN})
    wait_for(listed, "the last question")
    assert [item["text"] for item in listed()] == [UNKNOWN]


def test_names_and_secrets_are_not_kept(client: httpx.Client, listed: Listed) -> None:
    text = "frobnicator of jane.doe@example.com refuses Authorization: Bearer sk-abcdefghijklmnopqrstuvwxyz012345 at /home/janed/x"
    client.get("/v1/search", params={"q": text})
    wait_for(listed, "the question")
    (gap,) = listed()
    assert gap["text"].startswith("frobnicator of <")
    assert not any(secret in gap["text"] for secret in ("jane", "example.com", "abcdef"))


def test_a_log_that_nothing_explains_is_a_gap_of_its_kind(client: httpx.Client, listed: Listed) -> None:
    for day in (1, 2):
        log = f"2026-03-0{day} 08:00:00 zork: Error: the frobnicator is out of quux\n"
        assert client.post("/v1/diagnose", content=log.encode()).json()["unexplained"]
    client.post("/v1/diagnose", content=b"RuntimeError: the thing broke: code 7\n")
    client.post("/v1/diagnose", content=b"all is well\n")
    wait_for(lambda: [item["count"] for item in listed()] == [2], "both logs to be counted as one")
    (gap,) = listed()
    assert (gap["kind"], gap["text"]) == ("diagnose", "zork: Error: the frobnicator is out of quux")


def test_pages_follow_each_other_most_frequent_first(client: httpx.Client, database: Database) -> None:
    gaps.add(database, [("search", f"question {number}", "") for number in range(5) for _ in range(number + 1)])
    message, cursor = [], None
    for _ in range(3):
        page = client.get("/v1/gaps", params={"limit": 2, **({"cursor": cursor} if cursor else {})}).json()
        message += [item["count"] for item in page["gaps"]]
        cursor = page["next"]
    assert message == [5, 4, 3, 2, 1]
    assert cursor is None
    assert client.get("/v1/gaps", params={"cursor": "made up"}).status_code == 422


def test_an_admin_removes_a_gap_and_that_is_written_down(
    client: httpx.Client, bearers: Bearers, database: Database, listed: Listed
) -> None:
    gaps.add(database, [("search", "one", ""), ("search", "two", "")])
    where = f"/v1/gaps/{gaps.digest('search', 'one')}"
    for headers, status in (({}, 401), (bearers["read"], 403), (bearers["report"], 403), (bearers["admin"], 204)):
        assert client.delete(where, headers=headers).status_code == status
    assert [item["text"] for item in listed()] == ["two"]
    assert [(item.action, item.outcome) for item in audit.page(database)][:1] == [("gap.forget", "ok")]
    gone = client.delete(where, headers=bearers["admin"])
    assert (gone.status_code, gone.json()["detail"][:21]) == (404, "no gap has the digest")
    assert client.delete("/v1/gaps/x", headers=bearers["admin"]).status_code == 422


def test_questions_are_answered_and_counted_later_when_the_database_is_away(tmp_path: Path) -> None:
    (tmp_path / "place").write_text("a file where the folder of the database should be")
    unanswered = UNANSWERED(Database.open(tmp_path / "place" / "service.db"))
    unanswered.add("search", "early")
    unanswered.write()
    unanswered.add("search", "late")
    unanswered.write()
    (tmp_path / "place").unlink()
    unanswered.write()
    unanswered.write()
    assert {item.text for item in gaps.page(Database.open(tmp_path / "place" / "service.db"))} == {"early", "late"}
    assert unanswered.dropped == 0


def test_when_too_many_wait_the_rest_is_dropped_and_counted(store_path: Path) -> None:
    unanswered = UNANSWERED(Database.open(store_path))
    for number in range(LIMITS.MOST_WAITING + 7):
        unanswered.add("search", f"question {number}")
    assert unanswered.dropped == 7


def test_what_was_noted_last_is_written_at_the_end(store_path: Path) -> None:
    database = Database.open(store_path)
    unanswered = UNANSWERED(database)
    with unanswered.writing():
        for number in range(LIMITS.MOST_AT_ONCE + 5):
            unanswered.add("search", f"question {number}")
    assert len(gaps.page(database, 1000)) == LIMITS.MOST_AT_ONCE + 5


def test_a_long_text_is_kept_as_one_short_line(store_path: Path) -> None:
    unanswered = UNANSWERED(Database.open(store_path))
    unanswered.add("search", "word\n" * 2000)
    unanswered.write()
    (gap,) = gaps.page(Database.open(store_path))
    assert gap.text == " ".join(["word"] * 60)
