"""The entries over HTTP: lists in pages, one entry in three forms, and nothing sent twice."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.content.area import Area
from tests.support.console import ContentRoot, Kb, wait_until_ready

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]


def ids(client: httpx.Client, **filters: Any) -> list[str]:
    return [item["id"] for item in client.get("/v1/entries", params=filters).json()["entries"]]


def test_the_list_is_that_of_the_command(client: httpx.Client, kb: Kb) -> None:
    printed = [item for item in kb("list", "--json").json["entries"] if item["origin"] != "built-in"]
    assert client.get("/v1/entries").json()["entries"] == printed
    assert len(printed) == 2


def test_filters_narrow_the_list(client: httpx.Client) -> None:
    assert ids(client) == ["broken-thing", "slow-disk"]
    assert ids(client, tag="storage") == ["slow-disk"]
    assert ids(client, tag=["test", "storage"]) == ["slow-disk"]
    assert ids(client, tag="Test", framework="Storage") == ["slow-disk"]
    assert ids(client, framework="TORCH") == ["slow-disk"]
    assert ids(client, status="withdrawn") == ["old-thing"]
    assert ids(client, status="reported") == []
    assert ids(client, area="hardware") == ["slow-disk"]
    assert ids(client, area=["data", "hardware"]) == ["broken-thing", "slow-disk"]
    assert ids(client, area="memory") == []


def test_a_filter_that_nothing_can_pass_names_the_nearest(client: httpx.Client) -> None:
    answer = client.get("/v1/entries", params={"tag": ["test", "storag"]})
    assert answer.status_code == 422
    assert "storage" in answer.json()["hint"]


def test_an_area_that_does_not_exist_is_refused_with_the_list_of_areas(client: httpx.Client) -> None:
    answer = client.get("/v1/entries", params={"area": "disks"})
    assert answer.status_code == 422
    assert all(repr(area.value) in answer.text for area in Area)


def test_an_entry_is_that_of_the_command_but_for_files_of_this_machine(client: httpx.Client, kb: Kb) -> None:
    printed = kb("show", "slow-disk", "--json").json
    for name in ("schema", "ok", "probe_file"):
        del printed[name]
    assert client.get("/v1/entries/slow-disk").json() == printed


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("*/*", "application/json"),
        ("text/markdown", "text/markdown; charset=utf-8"),
        ("text/*", "text/markdown; charset=utf-8"),
        ("text/markdown;q=0.5, application/json", "application/json"),
        ("application/json;q=0.1, text/markdown;q=0.2", "text/markdown; charset=utf-8"),
        ("application/json;q=0, */*", "text/markdown; charset=utf-8"),
        ("text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8", "text/html; charset=utf-8"),
        ("TEXT/MARKDOWN; q=high", "text/markdown; charset=utf-8"),
        ("", "application/json"),
    ],
)
def test_accept_chooses_between_json_the_file_and_the_page(client: httpx.Client, accept: str, kind: str) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": accept})
    assert (response.status_code, response.headers["content-type"]) == (200, kind)
    assert "Accept" in response.headers["vary"].split(", ")


def test_markdown_is_the_file_as_it_is_written(client: httpx.Client, entries: ContentRoot) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": "text/markdown"})
    assert response.content == (entries.path / "entries" / "slow-disk.md").read_bytes()


def test_the_page_has_the_title_and_is_in_the_language_of_the_reader(client: httpx.Client) -> None:
    pages = {
        language: client.get("/v1/entries/slow-disk", headers={"Accept": "text/html", "Accept-Language": language})
        for language in ("en", "zh-CN")
    }
    assert "The disk is slow" in pages["en"].text
    assert "不要弄坏" in pages["zh-CN"].text
    assert pages["en"].headers["etag"] != pages["zh-CN"].headers["etag"]


@pytest.mark.parametrize("accept", ["image/png", "application/json;q=0, text/*;q=0"])
def test_another_kind_is_not_acceptable(client: httpx.Client, accept: str) -> None:
    response = client.get("/v1/entries/slow-disk", headers={"Accept": accept})
    assert response.status_code == 406
    assert "Accept" in response.headers["vary"]
    assert "text/markdown" in response.json()["detail"]


@pytest.mark.parametrize("path", ["/v1/entries", "/v1/entries/slow-disk"])
def test_what_the_client_has_is_not_sent_again(client: httpx.Client, path: str) -> None:
    first = client.get(path)
    tag = first.headers["etag"]
    assert tag.startswith('"')
    for sent in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = client.get(path, headers={"If-None-Match": sent})
        assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    for sent in ('"other"', tag.strip('"'), ""):
        assert client.get(path, headers={"If-None-Match": sent}).content == first.content
    assert first.headers["cache-control"] == "private, max-age=0, must-revalidate"


def test_each_form_has_a_tag_of_its_own(client: httpx.Client) -> None:
    kinds = ("application/json", "text/markdown", "text/html")
    tags = {client.get("/v1/entries/slow-disk", headers={"Accept": kind}).headers["etag"] for kind in kinds}
    assert len(tags) == 3


def test_the_tag_changes_with_the_entry(app: FastAPI, serve: Serve, entries: ContentRoot) -> None:
    tags = []
    for title in ("One title", "Another title"):
        entries.entry("slow-disk", title=title)
        with serve(app) as client:
            wait_until_ready(app)
            tags.append(client.get("/v1/entries/slow-disk").headers["etag"])
    assert tags[0] != tags[1]


def test_a_list_comes_in_pages_that_join_to_the_whole(client: httpx.Client, entries: ContentRoot) -> None:
    first = client.get("/v1/entries", params={"limit": 1}).json()
    second = client.get("/v1/entries", params={"limit": 1, "cursor": first["next"]}).json()
    assert [item["id"] for item in first["entries"] + second["entries"]] == ["broken-thing", "slow-disk"]
    assert second["next"] is None


def test_pages_keep_to_the_filters(client: httpx.Client) -> None:
    first = client.get("/v1/entries", params={"limit": 1, "tag": "storage"}).json()
    assert ([item["id"] for item in first["entries"]], first["next"]) == (["slow-disk"], None)


@pytest.mark.parametrize("cursor", ["", "x", "not a cursor", "AAAAAAAAc2xvdw", "é", "a" * 401, "%00"])
def test_a_cursor_that_was_never_given_out_is_refused(client: httpx.Client, cursor: str) -> None:
    response = client.get("/v1/entries", params={"cursor": cursor})
    assert response.status_code == 422
    assert "cursor" in response.json()["detail"]
