"""Who may ask what: nobody without a key beyond this machine, and a key what its scope says."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.store import audit, keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.clock import Clock
from tests.support.console import wait_for, wait_until_ready
from tests.support.ready_store import ready_store

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
Make = Callable[..., FastAPI]
access: Any = resolve_name("kb.api.requests.access")
Anonymous: Any = resolve_name("kb.api.settings:Anonymous")
OPEN = {"/healthz", "/readyz", "/openapi.json", "/docs", "/sign-in", "/sign-out"}
FOREIGN = {"client": "192.0.2.7"}


@pytest.fixture
def store(store_path: Path) -> Iterator[Database]:
    with Database.open(ready_store(store_path)) as opened:
        yield opened


@pytest.fixture
def key(store: Database) -> Callable[..., str]:
    """Makes a key and gives its text."""

    def make(scope: Scope = Scope.READ) -> str:
        return keys.new(store, f"test-{scope}", scope)[1]

    return make


@pytest.fixture
def closed(make_app: Make, serve: Serve) -> Iterator[httpx.Client]:
    """A client of a service that answers to keys only."""
    app = make_app(anonymous=Anonymous.NOBODY)
    with serve(app) as client:
        wait_until_ready(app)
        yield client


def bearer(text: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {text}"}


def refused(response: httpx.Response, status: int, kind: str) -> dict[str, Any]:
    document: dict[str, Any] = response.json()
    assert (response.status_code, document["type"]) == (status, f"urn:kb:problem:{kind}")
    return document


def operations(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of everything that is routed, in the description of the API or not."""
    walked = [(method, route.path) for route in _routes(app.router) for method in route.methods or ()]
    return sorted(set(walked))


def _routes(router: Any) -> Iterator[Any]:
    for route in router.routes:
        if hasattr(route, "methods"):
            yield route
        else:
            inner = getattr(route, "original_router", None) or getattr(route, "app", None)
            yield from _routes(inner)


def test_on_loopback_a_program_of_this_machine_reads_without_a_key(client: httpx.Client) -> None:
    for host in ("localhost", "localhost:8000", "127.0.0.1:8000", "127.1.2.3", "[::1]:8000"):
        assert client.get("/v1/search?q=thing", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["kb.example.org", "127.0.0.1.example.org", "localhost.example.org:8000", "10.0.0.1", ""]
)
def test_a_page_that_rebinds_its_name_to_this_machine_gets_nothing(client: httpx.Client, host: str) -> None:
    document = refused(client.get("/v1/search?q=thing", headers={"Host": host}), 401, "key-needed")
    assert "kb key new" in document["hint"]


@pytest.mark.parametrize(
    "name", ["Forwarded", "X-Forwarded-For", "X-Forwarded-Proto", "X-Forwarded-Host", "X-Real-IP", "Via"]
)
def test_who_comes_through_a_proxy_is_never_local(client: httpx.Client, name: str) -> None:
    refused(client.get("/v1/search?q=thing", headers={name: "127.0.0.1"}), 401, "key-needed")


def test_who_comes_from_another_machine_needs_a_key(client: httpx.Client, key: Callable[..., str]) -> None:
    refused(client.get("/v1/search?q=thing", extensions=FOREIGN), 401, "key-needed")
    assert client.get("/v1/search?q=thing", extensions=FOREIGN, headers=bearer(key())).status_code == 200


def test_without_a_key_nothing_but_what_is_meant_to_be_open_is(closed: httpx.Client) -> None:
    app = closed._transport.app  # type: ignore[attr-defined]
    result = operations(app)
    assert len(result) > 25
    for method, path in [*result, ("GET", "/no/such/path"), ("PROPFIND", "/v1/search")]:
        response = closed.request(method, path.replace("{", "").replace("}", ""))
        if path in OPEN or path.startswith("/static/"):
            assert "www-authenticate" not in response.headers  # a sign-in without a key is refused in its own words
        else:
            assert (path, response.status_code) == (path, 401)
            assert response.headers["www-authenticate"] == "Bearer"


def test_everybody_may_read_where_the_service_says_so_but_not_write(make_app: Make, serve: Serve) -> None:
    with serve(make_app(anonymous=Anonymous.EVERYBODY)) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, "the content")
        proxied = {"Host": "kb.example.org", "X-Forwarded-For": "192.0.2.9"}
        assert client.get("/v1/search?q=thing", extensions=FOREIGN, headers=proxied).status_code == 200
        refused(client.post("/v1/reports", json={}, headers={"Idempotency-Key": "12345678"}), 401, "key-needed")
        refused(client.post("/v1/admin/reindex"), 401, "key-needed")


def test_a_key_works_the_moment_it_is_made(closed: httpx.Client, key: Callable[..., str]) -> None:
    assert closed.get("/v1/entries", headers=bearer(key())).status_code == 200


def test_every_other_text_is_refused_in_the_same_words(closed: httpx.Client, key: Callable[..., str]) -> None:
    text = key()
    other = text[:-1] + ("A" if text[-1] != "A" else "B")
    for item in (other, text[:-1], f"{text}x", "kb_aaaaaaaa_" + text[12:], "kb_", "-", "\x7f", "ключ"):
        headers = {b"authorization": f"Bearer {item}".encode()}
        assert (
            refused(closed.get("/v1/entries", headers=headers), 401, "key-needed")["detail"]
            == "this key is not accepted"
        )


@pytest.mark.parametrize("header", ["Basic a2I6a2I=", "Bearer", "Bearer ", "kb_aaaaaaaa_x"])
def test_another_kind_of_authorization_is_no_key(closed: httpx.Client, header: str) -> None:
    refused(closed.get("/v1/entries", headers={"Authorization": header}), 401, "key-needed")


def test_a_revoked_key_is_refused_after_the_next_look_at_the_database(
    closed: httpx.Client, key: Callable[..., str], store: Database
) -> None:
    text = key()
    assert closed.get("/v1/entries", headers=bearer(text)).status_code == 200
    keys.revoke(store, text.split("_")[1])
    wait_for(lambda: closed.get("/v1/entries", headers=bearer(text)).status_code == 401, "the key to be refused")


@pytest.mark.parametrize(
    ("scope", "post", "reindex"), [(Scope.READ, 403, 403), (Scope.REPORT, 422, 403), (Scope.ADMIN, 422, 202)]
)
def test_a_key_may_do_what_its_scope_says(
    closed: httpx.Client, key: Callable[..., str], scope: Scope, post: int, reindex: int
) -> None:
    headers = {**bearer(key(scope)), "Idempotency-Key": "12345678"}
    assert closed.get("/v1/search?q=thing", headers=headers).status_code == 200
    assert closed.post("/v1/reports", json={}, headers=headers).status_code == post
    response = closed.post("/v1/admin/reindex", headers=headers)
    assert response.status_code == reindex
    if reindex == 403:
        assert "--scope admin" in refused(response, 403, "not-allowed")["hint"]


def test_a_browser_that_signs_in_carries_the_key_in_a_cookie_that_no_script_sees(
    closed: httpx.Client, key: Callable[..., str]
) -> None:
    text = key()
    response = closed.post("/sign-in", data={"key": f" {text}\n"})
    assert response.status_code == 303
    cookie = response.headers["set-cookie"]
    assert all(word in cookie for word in (f"kb_key={text}", "HttpOnly", "SameSite=lax", "Path=/"))
    assert "Secure" not in cookie
    assert closed.get("/v1/entries").status_code == 200
    secure = closed.post("https://localhost/sign-in", data={"key": text}, headers={"Origin": "https://localhost"})
    assert "Secure" in secure.headers["set-cookie"]


def test_signing_out_takes_the_cookie_away(closed: httpx.Client, key: Callable[..., str]) -> None:
    closed.post("/sign-in", data={"key": key()})
    closed.post("/sign-out", headers={"Origin": "http://localhost"})
    refused(closed.get("/v1/entries"), 401, "key-needed")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 403),  # every browser says where a form comes from
        ({"Origin": "https://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://localhost:81"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Origin": "http://localhost"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Origin": "http://localhost"}, 200),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
def test_with_a_cookie_only_pages_of_this_service_may_send_forms(
    closed: httpx.Client, key: Callable[..., str], headers: dict[str, str], status: int
) -> None:
    closed.cookies.set("kb_key", key(), domain="localhost.local", path="/")
    assert closed.post("/v1/diagnose", content=b"the thing broke: code 1", headers=headers).status_code == status


@pytest.mark.parametrize("path", ["/v1/diagnose", "/sign-in", "/v1/feedback"])
def test_pages_of_other_sites_may_not_use_that_a_service_is_open_on_this_machine(
    client: httpx.Client, path: str
) -> None:
    for output in ({"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        refused(client.post(path, content=b"x", headers=output), 403, "not-allowed")
    assert client.post("/v1/diagnose", content=b"the thing broke: code 1").status_code == 200  # curl says nothing


def test_after_ten_wrong_keys_a_guesser_has_to_wait_and_who_has_a_key_has_not(
    closed: httpx.Client, key: Callable[..., str]
) -> None:
    closed._transport.app.state.access._wrong_keys._clock = Clock()  # type: ignore[attr-defined]  # ten looks take 5 s
    text = key()
    wrong = bearer("kb_aaaaaaaa_" + "A" * 43)
    assert [closed.get("/v1/entries", headers=wrong).status_code for _ in range(10)] == [401] * 10
    response = closed.get("/v1/entries", headers=wrong)
    refused(response, 429, "too-many-requests")
    assert response.headers["retry-after"] == "6"
    assert closed.get("/v1/entries", headers=wrong, extensions=FOREIGN).status_code == 401
    wait_for(lambda: closed.get("/v1/entries", headers=bearer(text)).status_code == 200, "the key to be known")


def test_each_key_is_limited_on_its_own(make_app: Make, serve: Serve, key: Callable[..., str]) -> None:
    item, other = key(), key()
    with serve(make_app(rate="3/hour")) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, "the content")
        answers = [client.get("/v1/entries", headers=bearer(item)) for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
        assert 1000 <= int(answers[-1].headers["retry-after"]) <= 1200
        assert {answer.headers["ratelimit-policy"] for answer in answers} == {'"default";q=3;w=3600'}
        assert [answer.headers["ratelimit"].partition(";t=")[0] for answer in answers] == [
            f'"default";r={left}' for left in (2, 1, 0, 0)
        ]
        assert "ratelimit" not in client.get("/v1/entries").headers
        assert client.get("/v1/entries", headers=bearer(other)).status_code == 200
        assert {client.get("/v1/entries").status_code for _ in range(10)} == {200}  # nobody limits loopback


def test_strangers_are_limited_by_address_where_everybody_may_read(make_app: Make, serve: Serve) -> None:
    with serve(make_app(rate="2/hour", anonymous=Anonymous.EVERYBODY)) as client:
        wait_for(lambda: client.get("/readyz").status_code == 200, "the content")
        statuses = [client.get("/v1/entries", extensions=FOREIGN).status_code for _ in range(3)]
        assert statuses == [200, 200, 429]
        assert client.get("/v1/entries", extensions={"client": "192.0.2.8"}).status_code == 200


def test_when_a_key_was_used_last_is_written_down(
    make_app: Make, serve: Serve, key: Callable[..., str], store: Database
) -> None:
    text = key()
    with serve(make_app()) as client:
        wait_for(lambda: client.get("/v1/entries", headers=bearer(text)).status_code == 200, "the content")
    (stored,) = keys.list_all(store)
    assert stored.key.last_used_at
    age = datetime.datetime.now(datetime.UTC).replace(tzinfo=None) - stored.key.last_used_at
    assert abs(age) < datetime.timedelta(minutes=10)


def test_a_write_is_audited_with_the_key_and_the_number_of_the_request(
    closed: httpx.Client, key: Callable[..., str], store: Database
) -> None:
    text = key(Scope.ADMIN)
    response = closed.post("/v1/admin/reindex", headers={**bearer(text), "X-Request-ID": "from-the-proxy-17"})
    assert response.status_code == 202
    (result,) = [item for item in audit.page(store) if item.action == "reindex"]
    assert (result.actor, result.request_id) == (text.split("_")[1], "from-the-proxy-17")
