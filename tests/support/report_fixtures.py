"""Nodes that send reports to the API of `app_fixtures`, and their keys.

A test file uses `pytest_plugins = ["tests.support.report_fixtures"]` and the fixture `bearers` first, because a service
knows the keys that exist when it starts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.ready_store import ready_store
from tests.support.shared_reports import KEY, Post

pytest_plugins = ["tests.support.app_fixtures"]


@pytest.fixture
def report_store(store_path: Path) -> Database:
    return Database.open(ready_store(store_path))


@pytest.fixture
def bearers(report_store: Database) -> dict[str, str]:
    """The Authorization headers of two nodes and of a reader."""
    scopes = {"node": Scope.REPORT, "other": Scope.REPORT, "reader": Scope.READ}
    return {name: f"Bearer {keys.new(report_store, name, scope)[1]}" for name, scope in scopes.items()}


@pytest.fixture
def post_report(client: httpx.Client, bearers: dict[str, str]) -> Post:
    def send(document: dict[str, Any] | bytes, key: str = KEY, **headers: str) -> httpx.Response:
        body = document if isinstance(document, bytes) else json.dumps(document).encode()
        given = {
            "Content-Type": "application/json",
            "Idempotency-Key": key,
            "Authorization": bearers["node"],
            **headers,
        }
        return client.post("/v1/reports", content=body, headers=given)

    return send
