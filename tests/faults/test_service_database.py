"""The database dies, is not there yet, or has no space left: reading goes on, writing is refused and then works again."""

from __future__ import annotations

import json
import resource
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from kb.store import feedback, keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import GENEROUS_S, wait_for
from tests.support.kb_serve import Serving, listening, serving
from tests.support.postgres_server import Server as Postgres

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.postgres_fixtures"]

HELPED = {"entry": "nan-loss", "helped": True}
CLIENTS = 3
WITHOUT_IT = {
    "/v1/search?q=timeout": 200,
    "/v1/context?q=timeout": 200,
    "/v1/entries/nan-loss": 200,
    "/v1/gaps": 503,
    "/v1/reports": 503,
    "/v1/feedback?entry=nan-loss": 503,
    "/v1/admin/audit": 503,
}  # what a replica with keys that it has read answers while the database is away


def write(server: Serving, comment: str = "", **headers: str) -> tuple[int, dict[str, str]]:
    """(status, headers) of a write."""
    body = json.dumps({**HELPED, "comment": comment}).encode()
    status, answered, _ = server.ask("POST", "/v1/feedback", body, Content_Type="application/json", **headers)
    return status, answered


def read(server: Serving, stopping: Event, **headers: str) -> set[int]:
    """The statuses of one client that asks one question after the other."""
    names = set()
    while not stopping.is_set():
        names.add(server.ask("GET", "/v1/search?q=ALLGATHER+timeout+save", **headers)[0])
    return names


def test_when_postgresql_is_killed_reading_goes_on_and_who_writes_is_told_to_come_again(
    postgres: Postgres, postgres_url: str
) -> None:
    with Database.open(postgres_url) as store:
        _, text = keys.new(store, "test", Scope.ADMIN)
    header = {"Authorization": f"Bearer {text}"}
    with serving(KB_DATABASE_URL=postgres_url, KB_RATE="") as server, ThreadPoolExecutor(CLIENTS) as clients:
        assert write(server, **header)[0] == 201
        stopping = Event()
        asked = [clients.submit(read, server, stopping, **header) for _ in range(CLIENTS)]
        try:
            postgres.kill()
            for _ in range(3):
                status, answered = write(server, **header)
                assert (status, answered["retry-after"]) == (503, "1")
            wait_for(lambda: "the last state that was read is served" in server.output, "the service to notice")
            assert server.get("/readyz")[0] == 200
            assert {path: server.ask("GET", path, **header)[0] for path in WITHOUT_IT} == WITHOUT_IT
            wait_for(lambda: b"kb_database_up 0.0" in server.ask("GET", "/metrics", **header)[2], "the metric")
            postgres.start()
            wait_for(lambda: write(server, **header)[0] == 201, "writing to work again")
        finally:
            stopping.set()
        assert set().union(*(item.result(60) for item in asked)) == {200}
    with Database.open(postgres_url) as store:
        assert [(helped, not_helped) for *_, helped, not_helped in feedback.counts(store)] == [(2, 0)]


def test_a_service_that_starts_before_postgresql_answers_and_knows_keys_when_it_is_there(
    postgres: Postgres, postgres_url: str
) -> None:
    with Database.open(postgres_url) as store:
        _, text = keys.new(store, "test", Scope.READ)
    header = {"Authorization": f"Bearer {text}"}
    postgres.kill()
    with serving(KB_DATABASE_URL=postgres_url) as server:
        assert server.get("/v1/search?q=timeout")[0] == 200  # of somebody on this machine
        status, answered, _ = server.ask("GET", "/v1/search?q=timeout", **header)
        assert (status, answered["retry-after"]) == (503, "1")
        postgres.start()
        wait_for(lambda: server.get("/v1/search?q=timeout", **header)[0] == 200, "the key to be known")
        wait_for(lambda: write(server)[0] == 201, "writing to work")


def test_beyond_loopback_it_starts_while_the_database_is_away_and_is_ready_when_it_knows_keys(
    postgres: Postgres, postgres_url: str
) -> None:
    with Database.open(postgres_url) as store:
        _, text = keys.new(store, "test", Scope.READ)
    header = {"Authorization": f"Bearer {text}"}
    postgres.kill()
    with listening("--host", "0.0.0.0", KB_DATABASE_URL=postgres_url) as server:
        assert "nobody gets an answer" in server.lines[0]
        wait_for(lambda: "it was never read" in server.output, "the service to notice", GENEROUS_S)
        wait_for(lambda: "keys cannot be checked" in server.get("/readyz")[1]["detail"], "the index", GENEROUS_S)
        status, answered, body = server.ask("GET", "/readyz")
        assert (status, answered["content-type"], answered["retry-after"]) == (503, "application/problem+json", "1")
        assert "until the database is read" in json.loads(body)["detail"]
        assert server.get("/healthz")[0] == 200
        assert server.get("/v1/entries")[0] == 401
        assert server.get("/v1/entries", **header)[0] == 503
        assert "is served" not in server.output
        postgres.start()
        wait_for(lambda: server.get("/readyz")[0] == 200, "the keys to be read")
        assert server.get("/v1/entries", **header)[0] == 200


def test_on_a_full_disk_reading_goes_on_and_writing_works_again_when_there_is_space(tmp_path: Path) -> None:
    where = tmp_path / "service.db"
    with serving(KB_DATABASE_URL=str(where)) as server:
        assert write(server)[0] == 201
        full = where.stat().st_size + (64 << 10)
        before = resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
        taken = 1
        for _ in range(500):
            status, answered = write(server, "x" * 500)
            if status != 201:
                break
            taken += 1
        assert (status, answered["retry-after"]) == (503, "1")
        assert server.get("/v1/search?q=timeout")[0] == 200
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, before)
        assert write(server)[0] == 201
    with Database.open(where) as store:
        assert [(helped, not_helped) for *_, helped, not_helped in feedback.counts(store)] == [(taken + 1, 0)]


def test_while_postgresql_is_frozen_nobody_waits_for_it_and_the_service_ends_when_it_is_told_to(
    postgres: Postgres, postgres_url: str
) -> None:
    """Its processes are stopped, and the kernel of its machine still takes what is sent."""
    with Database.open(postgres_url) as store:
        _, text = keys.new(store, "test", Scope.ADMIN)
    header, unknown = {"Authorization": f"Bearer {text}"}, {"Authorization": f"Bearer kb_aaaaaaaa_{'A' * 43}"}
    with serving(KB_DATABASE_URL=postgres_url, KB_RATE="") as server, ThreadPoolExecutor(CLIENTS) as clients:
        assert write(server, **header)[0] == 201
        with postgres.frozen():
            writes = [clients.submit(write, server, **header) for _ in range(CLIENTS)]
            assert server.ask("GET", "/v1/search?q=timeout", **unknown)[0] == 503
            assert server.ask("GET", "/v1/search?q=timeout", **header)[0] == 200
            assert {item.result(60)[0] for item in writes} == {503}
            wait_for(lambda: b"kb_database_up 0.0" in server.ask("GET", "/metrics", **header)[2], "the metric")
            assert server.stop(signal.SIGTERM) == -signal.SIGTERM
