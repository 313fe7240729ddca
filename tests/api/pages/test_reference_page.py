"""The reference of the API at /docs: everything that the description has, and nothing from elsewhere."""

from __future__ import annotations

import re
import shlex
from html import unescape
from typing import Any

import httpx
import pytest

pytest_plugins = ["tests.support.app_fixtures"]


@pytest.fixture
def description(client: httpx.Client) -> dict[str, Any]:
    document: dict[str, Any] = client.get("/openapi.json").json()
    return document


@pytest.fixture
def reference(client: httpx.Client) -> str:
    response = client.get("/docs", headers={"Accept": "text/html"})
    assert response.status_code == 200
    return response.text


def test_it_has_every_operation_parameter_and_model(reference: str, description: dict[str, Any]) -> None:
    anchors = set(re.findall(r' id="([^"]+)"', reference))
    for path, item in description["paths"].items():
        for method, operation in item.items():
            assert operation["operationId"] in anchors
            assert f"{method.upper()} {path}" in reference
            for parameter in operation.get("parameters", []):
                assert f"<code>{parameter['name']}</code>" in reference
    assert set(description["components"]["schemas"]) <= anchors


def test_its_links_lead_somewhere_and_it_needs_no_other_host(reference: str) -> None:
    anchors = set(re.findall(r' id="([^"]+)"', reference))
    assert set(re.findall(r'href="#([^"]+)"', reference)) <= anchors
    loaded = re.findall(r'(?:src|href)="(https?:[^"]+)"', reference)
    assert loaded == []
    assert "<script>" not in reference
    assert " style=" not in reference


def test_its_commands_name_no_placeholder_but_the_key_and_the_log(reference: str, description: dict[str, Any]) -> None:
    commands = [unescape(text) for text in re.findall(r"<pre><code>(curl [^<]+)</code>", reference)]
    assert len(commands) == 1 + sum(len(item) for item in description["paths"].values())
    for command in commands:
        url = next(word for word in shlex.split(command) if word.startswith("http"))
        assert "{" not in url


def test_it_is_open_as_the_description_is(client: httpx.Client) -> None:
    foreign = {"client": "192.0.2.7"}
    assert client.get("/v1/entries", extensions=foreign).status_code == 401
    assert client.get("/docs", extensions=foreign).status_code == 200
