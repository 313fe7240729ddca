"""New content is put in place while questions go on, in every replica; and the audit log is read."""

from __future__ import annotations

import fcntl
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.content.roots import root_at
from kb.search import index_cache
from kb.store import content_generation
from kb.store.database import Database
from tests.support.console import ContentRoot, ruin, wait_for, wait_until_ready

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]


def finds(client: httpx.Client, entry_id: str) -> bool:
    """Whether the service knows an entry; fails when it does not answer."""
    response = client.get(f"/v1/entries/{entry_id}")
    assert response.status_code in (200, 404)
    assert client.get("/readyz").status_code == 200
    return response.status_code == 200


def reindex(client: httpx.Client, admin: dict[str, str]) -> int:
    response = client.post("/v1/admin/reindex", headers=admin)
    assert response.status_code == 202
    return int(response.json()["generation"])


def test_new_content_is_served_by_every_replica_and_none_is_ever_not_ready(
    make_app: Callable[..., FastAPI], serve: Serve, entries: ContentRoot, admin: dict[str, str]
) -> None:
    first_app, other_app = make_app(), make_app()
    with serve(first_app) as item, serve(other_app) as other:
        for app in (first_app, other_app):
            wait_until_ready(app)
        entries.entry("brand-new", title="A brand new thing")
        assert not finds(item, "brand-new")
        assert reindex(item, admin) == 1
        for client in (item, other):
            wait_for(lambda client=client: finds(client, "brand-new"), "the new entry")  # type: ignore[misc]
            assert client.get("/v1/search?q=brand+new").json()["hits"][0]["id"] == "brand-new"
            assert "kb_content_generation 1.0" in client.get("/metrics", headers=admin).text


def test_a_replica_that_starts_later_serves_the_same_generation(
    make_app: Callable[..., FastAPI], serve: Serve, store_path: Path
) -> None:
    with Database.open(store_path) as store:
        content_generation.advance(store)
    app = make_app()
    with serve(app) as client:
        first = app.state.loading
        wait_until_ready(app)
        wait_for(lambda: "kb_database_up 1.0" in client.get("/metrics").text, "the first look")
        assert "kb_content_generation 1.0" in client.get("/metrics").text
        assert app.state.loading is first


def test_a_question_ends_with_the_content_it_began_with_and_that_is_closed_after_it(
    client: httpx.Client, app: FastAPI, entries: ContentRoot, admin: dict[str, str]
) -> None:
    old: Any = app.state.loading.result()
    gone, portal = weakref.ref(old), client._transport.portal  # type: ignore[attr-defined]
    entries.entry("brand-new")
    reindex(client, admin)
    wait_for(lambda: finds(client, "brand-new"), "the new entry")
    assert portal.call(old.search, "The disk is slow", 5).hits[0].id == "slow-disk"
    opened, searching = old.index, old.searching
    del old
    wait_for(lambda: gone() is None, "the old content to be let go")
    wait_for(lambda: opened._segments[0]._reader.is_closed, "the old index to be closed")
    wait_for(lambda: searching._shutdown, "its thread to be let go")


def test_content_that_cannot_be_read_leaves_the_old_in_place(
    client: httpx.Client,
    entries: ContentRoot,
    admin: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Somebody else is building the index and does not come to an end."""
    monkeypatch.setattr(index_cache, "LOCK_S", 0.1)
    entries.entry("brand-new")
    with (index_cache.home((root_at(entries.path),)) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        reindex(client, admin)
        wait_for(lambda: "the content cannot be served" in caplog.text, "the failure")
    assert not finds(client, "brand-new")
    assert finds(client, "slow-disk")
    reindex(client, admin)
    wait_for(lambda: finds(client, "brand-new"), "the new entry at the second try")


def test_a_broken_entry_takes_no_other_away(client: httpx.Client, entries: ContentRoot, admin: dict[str, str]) -> None:
    (entries.path / "entries" / "broken-entry.md").write_text("---\nid: [\n---\n")
    entries.entry("brand-new")
    reindex(client, admin)
    wait_for(lambda: finds(client, "brand-new"), "the new entry")
    assert finds(client, "slow-disk")


def test_the_audit_log_says_who_did_what_newest_first_page_by_page(client: httpx.Client, admin: dict[str, str]) -> None:
    for _ in range(3):
        reindex(client, admin)
    actor = admin["Authorization"].split("_")[1]
    first = client.get("/v1/admin/audit?limit=2", headers=admin).json()
    assert [(item["actor"], item["action"], item["subject"]) for item in first["audit"]] == [
        (actor, "reindex", "generations/3"),
        (actor, "reindex", "generations/2"),
    ]
    assert first["audit"][0]["at"].endswith("Z")
    second = client.get("/v1/admin/audit", params={"limit": 2, "cursor": first["next"]}, headers=admin).json()
    assert [item["action"] for item in second["audit"]] == ["reindex", "key.new"]
    assert second["next"] is None


def test_the_audit_log_is_for_administrators(client: httpx.Client) -> None:
    assert client.get("/v1/admin/audit").status_code == 401
    assert client.post("/v1/admin/reindex").status_code == 401


def test_without_a_database_nothing_is_reindexed_and_the_sender_is_told_to_come_again(
    client: httpx.Client, admin: dict[str, str], store_path: Path
) -> None:
    assert client.get("/v1/entries", headers=admin).status_code == 200
    ruin(store_path)
    response = client.post("/v1/admin/reindex", headers=admin)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert client.get("/v1/search?q=thing", headers=admin).status_code == 200
