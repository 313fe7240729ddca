"""What every request passes: numbers, headers, packing, limits of bodies, and the log."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

pytest_plugins = ["tests.support.app_fixtures"]

Serve = Callable[[FastAPI], AbstractContextManager[httpx.Client]]
upload: Any = resolve_name("kb.api.requests.upload")
PATHS = [
    "/",
    "/v1/search?q=thing",
    "/v1/entries/slow-disk",
    "/v1/entries/none",
    "/v1/search",
    "/healthz",
    "/no/such",
    "/fails",
]


class Endless(httpx.AsyncByteStream, httpx.SyncByteStream):
    """A body whose end never comes."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        yield b'{"q": '
        await asyncio.sleep(600)

    def __iter__(self) -> Iterator[bytes]:
        raise NotImplementedError


@pytest.fixture
def failing(client: httpx.Client, app: FastAPI) -> httpx.Client:
    """With one route that fails."""

    @app.get("/fails")
    def fails() -> None:
        raise RuntimeError("secret-token")

    return client


@pytest.mark.parametrize("path", PATHS)
def test_every_answer_has_a_number_and_tells_browsers_to_be_careful(failing: httpx.Client, path: str) -> None:
    headers = failing.get(path).headers
    assert re.fullmatch(r"[0-9a-f]{32}", headers["x-request-id"])
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["form-action"] == "'self'"
    assert "unsafe" not in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"
    assert headers["cross-origin-resource-policy"] == headers["cross-origin-opener-policy"] == "same-origin"
    assert "server" not in headers


@pytest.mark.parametrize("path", ["/", "/healthz", "/v1/entries", "/v1/search?q=thing", "/no/such"])
def test_who_asks_for_a_head_alone_gets_that_of_the_answer(client: httpx.Client, path: str) -> None:
    whole, head = client.get(path), client.head(path)
    assert head.status_code == whole.status_code
    assert head.headers["content-type"] == whole.headers["content-type"]


@pytest.mark.parametrize("path", ["/sign-in", "/diagnose", "/entries/slow-disk/feedback", "/no/such"])
@pytest.mark.parametrize(
    "kind", ["multipart/form-data; boundary=x; charset=punycode", "Multipart/Form-Data;CHARSET*=x''y"]
)
def test_a_form_in_another_charset_is_not_decoded(client: httpx.Client, path: str, kind: str) -> None:
    """In Python's punycode a form of 1 MB takes hours, in the event loop."""
    body = b'--x\r\nContent-Disposition: form-data; name="key"\r\n\r\n' + b"a" * 100_000 + b"\r\n--x--\r\n"
    heads = [[("Content-Type", kind)], [("Content-Type", kind), ("Content-Type", "text/plain")]]
    assert [client.post(path, content=body, headers=head).status_code for head in heads] == [415, 415]


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_no_other_site_may_read_anything(client: httpx.Client, method: str) -> None:
    asked = {"Origin": "https://evil.example", "Access-Control-Request-Method": "GET"}
    headers = client.request(method, "/v1/search?q=thing", headers=asked).headers
    assert not [name for name in headers if name.startswith("access-control")]


def test_what_needs_a_key_is_kept_by_nobody_unless_the_answer_says_so(client: httpx.Client) -> None:
    assert client.get("/v1/reports").headers["cache-control"] == "no-store"
    assert "private" in client.get("/v1/entries/slow-disk").headers["cache-control"]


@pytest.mark.parametrize(
    ("given", "is_taken"),
    [
        ("5d0c2a8e7f6b4b0e", True),
        ("trace-01.ABC_x", True),
        ("short", False),
        ("x" * 65, False),
        ("with space", False),
        ('quoted"12345', False),
        ("new\tline-12345", False),
    ],
)
def test_the_number_of_a_proxy_is_taken_over_when_it_is_one(client: httpx.Client, given: str, is_taken: bool) -> None:
    answered = client.get("/healthz", headers={"X-Request-ID": given}).headers["x-request-id"]
    assert (answered == given) is is_taken


def test_a_long_answer_is_packed_for_who_takes_it_packed(client: httpx.Client) -> None:
    packed = client.get("/openapi.json", headers={"Accept-Encoding": "gzip"})
    plain = client.get("/openapi.json", headers={"Accept-Encoding": "identity"})
    assert packed.headers["content-encoding"] == "gzip"
    assert "content-encoding" not in plain.headers
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    assert "content-encoding" not in client.get("/healthz", headers={"Accept-Encoding": "gzip"}).headers


@pytest.mark.parametrize(
    ("path", "most", "detail"),
    [
        ("/v1/diagnose", 32 << 20, "32 MB; `kb diagnose` reads files of any size"),
        ("/v1/search", 256 << 10, "256 kB"),
        ("/v1/reports", 64 << 10, "64 kB"),
        ("/no/such/path", 256 << 10, "256 kB"),
    ],
)
def test_a_body_that_is_announced_too_large_is_refused_before_it_is_read(
    client: httpx.Client, path: str, most: int, detail: str
) -> None:
    read = []

    def body() -> Iterator[bytes]:
        read.append(1)
        yield b"x"

    headers = {"Content-Length": str(most + 1), "Content-Type": "application/json", "Expect": "100-continue"}
    response = client.post(path, content=body(), headers=headers)
    assert response.status_code == 413
    assert response.json()["detail"].endswith(detail)
    assert response.headers["connection"] == "close"
    assert not read


def test_a_body_that_says_nothing_of_its_size_is_cut_behind_the_limit(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of the rest is read, so that its sender sees the answer."""
    monkeypatch.setattr(upload, "MOST_DRAINED", 50_000)
    sent = []

    def body() -> Iterator[bytes]:
        for _ in range(1000):
            sent.append(1)
            yield b"[" * 10_000

    response = client.post("/v1/search", content=body(), headers={"Content-Type": "application/json"})
    assert response.status_code == 413
    assert len(sent) < 40


def test_a_body_that_does_not_arrive_is_waited_for_only_so_long(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "BODY_S", 0.3)

    headers = {"Content-Type": "application/json", "Content-Length": "14"}
    request = client.build_request("POST", "/v1/search", headers=headers)
    request.stream = Endless()
    response = client.send(request)
    assert response.status_code == 408
    assert response.headers["connection"] == "close"


def test_a_request_is_one_line_of_the_log_without_what_was_asked(
    client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kb.requests")
    response = client.get(
        "/v1/entries/slow-disk?q=secret-question", headers={"Authorization": "Basic c2VjcmV0LWtleQ=="}
    )
    client.post("/v1/diagnose", content=b"secret-log: code 1")
    client.get("/secret-path")
    first, second, third = [vars(record) for record in caplog.records if record.name == "kb.requests"]
    assert (first["method"], first["route"], first["status"]) == ("GET", "/v1/entries/{id}", 200)
    assert first["request_id"] == response.headers["x-request-id"]
    assert first["caller"] == "anonymous"
    assert first["duration_ms"] > 0
    assert first["bytes"] == int(response.headers["content-length"])
    assert (second["route"], third["route"], third["status"]) == ("/v1/diagnose", "-", 404)
    assert "secret" not in json.dumps([first, second, third], default=str)


def test_what_fails_is_logged_with_the_number_that_the_client_was_told(
    failing: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    response = failing.get("/fails")
    assert response.status_code == 500
    (error,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert response.headers["x-request-id"] in error.getMessage()
    assert error.exc_info
    assert "secret" not in response.text
