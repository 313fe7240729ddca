"""Every error is a problem document that says what happened and nothing about the inside."""

from __future__ import annotations

import fcntl
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.content.roots import root_at
from kb.errors import IndexUnavailable, KbError, UsageError
from kb.search import index_cache
from tests.support.console import ContentRoot, wait_until_ready

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
MEMBERS = {"type", "title", "status", "detail", "instance"}


def problem(response: httpx.Response, status: int) -> dict[str, Any]:
    """The document, checked against RFC 9457."""
    document: dict[str, Any] = response.json()
    assert response.status_code == status == document["status"]
    assert response.headers["content-type"] == "application/problem+json"
    assert document.keys() >= MEMBERS
    assert document["detail"]
    assert "Traceback" not in response.text
    return document


def test_an_unknown_entry_names_the_nearest(client: httpx.Client) -> None:
    document = problem(client.get("/v1/entries/slow-dsik"), 404)
    assert document["type"] == "urn:kb:problem:unknown-entry"
    assert document["instance"] == "/v1/entries/slow-dsik"
    assert document["nearest"][0] == "slow-disk"
    assert "slow-disk" in document["hint"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v1/entries/",
        "/redoc",
        "/v1/search/",
        "/v1/entries/../../../etc/passwd",
        "/v1/entries/..%2F..%2Fetc%2Fpasswd",
        "/v1/entries/slow-disk.md",
        "/v1/entries/%2Fetc%2Fpasswd",
        "/v1/entries/断",
    ],
)
def test_an_unknown_path_is_not_found(client: httpx.Client, path: str) -> None:
    document = problem(client.get(path), 404)
    assert document["instance"].isascii()


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("path", ["/v1/entries", "/v1/entries/slow-disk", "/v1/entries/x/reports", "/healthz"])
def test_nothing_but_get_is_allowed(client: httpx.Client, method: str, path: str) -> None:
    response = client.request(method, path)
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD"
    assert response.headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/v1/search", ["q"]),
        ("/v1/search?q=", ["q"]),
        ("/v1/search?q=%20%0a", ["q"]),
        ("/v1/search?q=x&limit=0", ["limit"]),
        ("/v1/search?q=x&limit=51", ["limit"]),
        ("/v1/search?limit=many", ["limit", "q"]),
        ("/v1/entries?status=true", ["status"]),
        ("/v1/entries/slow-disk/reports?limit=-1", ["limit"]),
        ("/v1/entries/slow-disk/reports?limit=1e9", ["limit"]),
    ],
)
def test_a_request_that_makes_no_sense_names_each_parameter(
    client: httpx.Client, path: str, parameters: list[str]
) -> None:
    document = problem(client.get(path), 422)
    assert sorted(item["parameter"] for item in document["errors"]) == parameters
    assert all(item["detail"] for item in document["errors"])


def test_an_empty_query_is_called_that(client: httpx.Client) -> None:
    assert problem(client.get("/v1/search?q=%20"), 422)["errors"] == [
        {"parameter": "q", "detail": "the query is empty"}
    ]


def test_a_broken_store_is_unavailable_and_its_place_stays_private(client: httpx.Client, store_path: Path) -> None:
    store_path.parent.mkdir()
    store_path.write_text("no database " * 100)
    document = problem(client.get("/v1/entries/slow-disk/reports"), 503)
    assert document["type"] == "urn:kb:problem:store-unavailable"
    assert str(store_path.parent) not in str(document)
    assert client.get("/v1/entries/slow-disk").status_code == 200


def test_a_body_that_is_no_json_is_called_so(client: httpx.Client) -> None:
    document = problem(client.post("/v1/search", content=b"{q: 1", headers={"Content-Type": "application/json"}), 422)
    assert [item["parameter"] for item in document["errors"]] == ["body"]
    assert document["detail"].startswith("body: JSON decode error")


@pytest.mark.parametrize("error", [RuntimeError("secret-token"), KbError("secret-token", "secret-hint")])
def test_an_error_of_ours_tells_nothing_about_the_inside(client: httpx.Client, app: FastAPI, error: Exception) -> None:
    @app.get("/fails")
    def fails() -> None:
        raise error

    response = client.get("/fails")
    problem(response, 500)
    assert "secret" not in response.text
    assert "RuntimeError" not in response.text


def test_until_the_index_is_open_only_liveness_is_answered(app: FastAPI, client: httpx.Client) -> None:
    content, app.state.loading = app.state.loading, Future()
    assert client.get("/healthz").json() == {"status": "ok"}
    for path in ("/readyz", "/v1/search?q=x", "/v1/entries", "/v1/entries/slow-disk"):
        response = client.get(path)
        assert problem(response, 503)["type"] == "urn:kb:problem:index-unavailable"
        assert response.headers["retry-after"]
    app.state.loading = content
    assert client.get("/readyz").json() == {"status": "ready", "entries": 3}


def test_where_only_keys_get_answers_it_is_not_ready_while_none_can_be_checked(
    make_app: Callable[..., FastAPI], serve: Serve, store_path: Path
) -> None:
    store_path.parent.mkdir()
    store_path.write_text("no database " * 100)
    for anonymous, status in (("nobody", 503), ("loopback", 200)):
        app = make_app(anonymous=resolve_name("kb.api.settings:Anonymous")(anonymous))
        with serve(app) as client:
            wait_until_ready(app)
            response = client.get("/readyz")
            assert response.status_code == status
            assert client.get("/healthz").status_code == 200
        if status == 503:
            assert "keys cannot be checked" in problem(response, 503)["detail"]
            assert response.headers["retry-after"] == "1"


def test_content_that_cannot_be_read_leaves_it_not_ready(
    app: FastAPI, serve: Serve, entries: ContentRoot, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else is building the index and does not come to an end."""
    home = index_cache.home((root_at(entries.path),))
    home.mkdir(parents=True, mode=0o700)
    monkeypatch.setattr(index_cache, "LOCK_S", 0.1)
    with (home / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with serve(app) as client:
            assert isinstance(app.state.loading.exception(60), IndexUnavailable)
            document = problem(client.get("/readyz"), 503)
    assert "could not be opened" in document["detail"]
    assert "another process has been building the index" in caplog.text
    assert str(entries.path) not in str(document)


def test_a_root_that_is_none_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_ROOTS", str(tmp_path / "absent"))
    with pytest.raises(UsageError, match="not a content root"):
        resolve_name("kb.api.app:create_app")()


BOMBS = {
    "nested brackets": b"[" * 100_000,
    "nested objects": b'{"q":' * 40_000,
    "a huge number": b'{"q": "x", "limit": ' + b"9" * 100_000 + b"}",
    "a huge exponent": b'{"q": "x", "limit": 1e999999}',
    "no JSON": b"\xff\xfe\x00",
    "half a surrogate": b'{"q": "\\ud800"}',
    "not a number": b'{"q": "x", "limit": NaN}',
    "a name twice": b'{"q": "thing", "q": 7}',
    "an empty body": b"",
}


@pytest.mark.parametrize("path", ["/v1/search", "/v1/feedback"])
@pytest.mark.parametrize("body", BOMBS.values(), ids=BOMBS)
def test_a_body_that_is_a_bomb_is_the_fault_of_the_client(client: httpx.Client, path: str, body: bytes) -> None:
    response = client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (400, 422)
    problem(response, response.status_code)


@pytest.mark.parametrize(
    "query", ["q=%00", "q=%ED%A0%80", "q=%ff%fe", "q=%F4%90%80%80", "q=x&tag=%00", "q=x&limit=%00"]
)
def test_no_characters_of_a_query_are_an_error_of_ours(client: httpx.Client, query: str) -> None:
    assert client.get(f"/v1/search?{query}").status_code in (200, 422)


@pytest.mark.parametrize(
    "path", ["/%00", "/v1/entries/%ff", "/v1/entries/%ED%A0%80", "/static/%00", "/entries/%00", "/%E2%80%AE"]
)
@pytest.mark.parametrize("accept", ["application/json", "text/html"])
def test_no_characters_of_a_path_are_an_error_of_ours(client: httpx.Client, path: str, accept: str) -> None:
    assert client.get(path, headers={"Accept": accept}).status_code in (404, 422)


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"


def test_a_browser_gets_a_page_where_it_is_not_asking_the_api(client: httpx.Client) -> None:
    response = client.get("/no/such/page", headers={"Accept": BROWSER})
    assert response.status_code == 404
    assert response.headers["content-type"].startswith("text/html")
    assert "there is nothing at /no/such/page" in response.text
    assert "content-security-policy" in response.headers


@pytest.mark.parametrize(
    ("path", "accept"), [("/v1/nothing", BROWSER), ("/no/such/page", "*/*"), ("/no/such/page", "application/json")]
)
def test_programs_get_problems(client: httpx.Client, path: str, accept: str) -> None:
    problem(client.get(path, headers={"Accept": accept}), 404)


def test_a_browser_without_a_key_gets_a_page_that_says_so(client: httpx.Client) -> None:
    response = client.get("/", headers={"Accept": BROWSER, "X-Forwarded-For": "192.0.2.7"})
    assert response.status_code == 401
    assert response.headers["content-type"].startswith("text/html")
    assert response.headers["www-authenticate"] == "Bearer"
