"""Who has no right to ask a real server, or no longer one."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import wait_for
from tests.support.kb_serve import Serving, serving

NOTICED_S = 2.0  # after at most this time a revoked key is refused; the rest is for a busy machine


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("database") / "service.db"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path, database: Path) -> Iterator[Serving]:
    home = str(tmp_path_factory.mktemp("service"))
    where = {"HOME": home, "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": home, "KB_ROOTS": ""}
    with serving("--workers", "2", KB_DATABASE_URL=str(database), **where) as started:
        yield started


def test_a_stolen_key_ends_when_it_is_revoked_in_every_worker(server: Serving, database: Path) -> None:
    with Database.open(database) as store:
        key, text = keys.new(store, "stolen", Scope.REPORT)
        header = {"Authorization": f"Bearer {text}"}
        assert {server.get("/v1/entries?limit=1", **header)[0] for _ in range(10)} == {200}
        keys.revoke(store, key.id)
    time.sleep(NOTICED_S)
    wait_for(
        lambda: {server.get("/v1/entries?limit=1", **header)[0] for _ in range(30)} <= {401, 429},
        "the key to be refused by every worker",
    )
    assert server.ask("POST", "/v1/reports", b"{}", **header, Idempotency_Key="12345678")[0] in (401, 429)


def test_a_name_that_is_rebound_to_this_machine_opens_nothing(server: Serving) -> None:
    for host in ("attacker.example", f"attacker.example:{server.port}", "127.0.0.1.attacker.example"):
        assert server.get("/v1/entries", Host=host)[0] == 401
        assert server.ask("POST", "/v1/diagnose", b"x", Host=host)[0] == 401
        assert server.ask("POST", "/mcp", b"{}", Host=host)[0] == 401
    assert server.get("/v1/entries", Host=f"localhost:{server.port}")[0] == 200


def test_behind_a_proxy_nobody_is_local(server: Serving) -> None:
    for header in ({"X_Forwarded_For": "127.0.0.1"}, {"Forwarded": "for=127.0.0.1"}, {"X_Real_IP": "::1"}):
        assert server.get("/v1/entries", **header)[0] == 401


def test_a_proxy_that_says_nothing_of_itself_is_known_by_its_old_http(server: Serving) -> None:
    """What nginx sends upstream by `proxy_pass http://127.0.0.1:8000;` alone."""
    with socket.create_connection((server.host, server.port), timeout=60) as client:
        client.sendall(b"GET /v1/entries HTTP/1.0\r\nHost: 127.0.0.1:8000\r\nConnection: close\r\n\r\n")
        assert client.recv(1 << 16).split()[1] == b"401"


def test_no_answer_and_no_line_of_the_log_holds_a_key(server: Serving, database: Path) -> None:
    with Database.open(database) as store:
        _, text = keys.new(store, "careful", Scope.READ)
    secret = text.split("_", 2)[2]
    for path in ("/v1/entries", "/v1/entries/none", "/metrics", "/nowhere"):
        _, headers, body = server.ask("GET", path, Authorization=f"Bearer {text}", Accept_Encoding="identity")
        assert secret not in str(headers) + body.decode()
    server.ask("GET", f"/v1/search?q={text}", Authorization=f"Bearer {text}x", Cookie=f"kb_key={text}")
    assert secret not in server.output
    assert secret.encode() not in database.read_bytes()
