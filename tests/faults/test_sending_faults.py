"""Senders and services are killed, disks are full, the database is away: each report still arrives, and once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from peer import Peer, delivery_of, drop, hang, listening, report, says, start_node
from postgres import Server as Postgres
from replicas import Place, Replica, started
from support import wait_for

from kb.outbox import Outbox

pytest_plugins = ["postgres"]
NODES = 20
Arrived = Callable[[], Counter[str]]


@pytest.fixture
def peer() -> Iterator[Peer]:
    with listening() as peer:
        yield peer


def waiting(directory: Path, url: str) -> int:
    return len(Outbox(directory).waiting(url))


def test_a_sender_killed_before_any_of_its_actions_loses_nothing_and_sends_nothing_twice(
    peer: Peer, tmp_path: Path
) -> None:
    actions = delivery_of(start_node(tmp_path / "whole", peer.url, report()))["actions"]
    assert actions > 8
    unfinished = 0
    for number in range(1, actions + 1):
        directory, entry_id = tmp_path / str(number), f"killed-at-{number}"
        assert delivery_of(start_node(directory, peer.url, report(entry_id), KILL_AT=str(number))) == {}
        was_queued = waiting(directory, peer.url) == 1
        has_arrived = [json.loads(body)["id"] for body in peer.kept.values()].count(entry_id)
        unfinished += was_queued
        assert delivery_of(start_node(directory, peer.url))["sent"] == was_queued
        arrived = [json.loads(body)["id"] for body in peer.kept.values()].count(entry_id)
        assert arrived == max(was_queued, has_arrived)
        assert waiting(directory, peer.url) == 0
    assert unfinished > 4


def test_a_sender_killed_while_it_waits_for_the_answer_sends_again_under_the_same_key(
    peer: Peer, tmp_path: Path
) -> None:
    peer.behaviours = [lambda request: (request.keep(), hang(request))[1]]
    node = start_node(tmp_path, peer.url, report())
    wait_for(lambda: peer.kept, "the service to have the report")
    node.kill()
    assert delivery_of(node) == {}
    assert delivery_of(start_node(tmp_path, peer.url))["sent"] == 1
    assert len(peer.requests) == 2
    assert len(peer.kept) == 1


def test_a_service_that_loses_every_answer_has_each_report_once(peer: Peer, tmp_path: Path) -> None:
    peer.behaviours = [drop] * 3
    lost = delivery_of(start_node(tmp_path, peer.url, *(report(f"entry-{number}") for number in range(3))))
    assert (lost["sent"], lost["queued"]) == (0, 3)
    assert delivery_of(start_node(tmp_path, peer.url))["sent"] == 3
    assert len(peer.kept) == 3


@contextmanager
def reported(place: Place, scope: str = "report") -> Iterator[tuple[Replica, str, Arrived]]:
    """(a real service, a key for it, how often each report arrived there)."""
    key, reader = place.key(scope), place.key("read")
    with started(place) as replica:

        def arrived() -> Counter[str]:
            found: Counter[str] = Counter()
            page = "/v1/reports?limit=100"
            while page:
                status, document = replica.get(page, Authorization=f"Bearer {reader}")
                assert status == 200, document
                found.update(one["id"] for one in document["reports"])
                page = document["next"] and f"/v1/reports?limit=100&cursor={document['next']}"
            return found

        yield replica, key, arrived


@pytest.fixture
def place(tmp_path: Path, built_in_index: Path) -> Place:
    path = tmp_path / "service"
    path.mkdir()
    return Place(path, built_in_index)


def test_twenty_nodes_report_at_once_and_each_report_is_there_once(place: Place, tmp_path: Path) -> None:
    with reported(place) as (replica, key, arrived):
        nodes = [
            start_node(tmp_path / f"node-{number}", replica.url, report(f"node-{number}"), KB_API_KEY=key)
            for number in range(NODES)
        ]
        said = [delivery_of(node) for node in nodes]
        assert [one["sent"] for one in said] == [1] * NODES, said
        assert arrived() == {f"node-{number}": 1 for number in range(NODES)}


def test_a_service_killed_under_reports_has_each_once_after_it_is_back(place: Place, tmp_path: Path) -> None:
    key, directories = place.key("report"), [tmp_path / f"node-{number}" for number in range(8)]
    with started(place) as replica:
        port, url = str(replica.port), replica.url
        nodes = [
            start_node(directory, url, *(report(f"{directory.name}-{one}") for one in range(20)), KB_API_KEY=key)
            for directory in directories
        ]
        wait_for(lambda: any(waiting(directory, url) in range(1, 19) for directory in directories), "the first reports")
        replica.process.kill()
        left = sum(delivery_of(node)["queued"] for node in nodes)
    assert left > 0, "it was killed too late to matter"
    with reported(place, "read") as (replica, _, arrived):
        for directory in directories:  # the service came back at another port
            for path in directory.glob("*.json"):
                path.write_text(path.read_text().replace(f":{port}", f":{replica.port}"))
        nodes = [start_node(directory, replica.url, KB_API_KEY=key) for directory in directories]
        assert sum(delivery_of(node)["sent"] for node in nodes) == left
        assert arrived() == {f"{directory.name}-{one}": 1 for directory in directories for one in range(20)}


def test_a_revoked_key_keeps_the_reports_until_another_is_set(place: Place, tmp_path: Path) -> None:
    with reported(place) as (replica, key, arrived):
        place.kb("key", "revoke", key.split("_")[1])
        wait_for(
            lambda: replica.get("/v1/entries?limit=1", Authorization=f"Bearer {key}")[0] == 401, "the key to be void"
        )
        refused = delivery_of(start_node(tmp_path, replica.url, report(), KB_API_KEY=key))
        assert (refused["queued"], refused["refused"]) == (1, 0)
        assert "KB_API_KEY" in refused["problems"][0]
        assert key not in refused["problems"][0]
        assert delivery_of(start_node(tmp_path, replica.url, KB_API_KEY=place.key("report")))["sent"] == 1
        assert arrived() == {"the-entry": 1}


def test_a_key_that_may_only_read_keeps_the_reports(place: Place, tmp_path: Path) -> None:
    with reported(place, "read") as (replica, key, _):
        refused = delivery_of(start_node(tmp_path, replica.url, report(), KB_API_KEY=key))
    assert refused["queued"] == 1
    assert "may report" in refused["problems"][0]


def test_a_report_that_is_none_is_refused_and_holds_up_no_other(place: Place, tmp_path: Path) -> None:
    with reported(place) as (replica, key, arrived):
        said = delivery_of(
            start_node(tmp_path, replica.url, report(verdict="splendid"), report("sound"), KB_API_KEY=key)
        )
        assert (said["sent"], said["refused"], said["queued"]) == (1, 1, 0)
        assert arrived() == {"sound": 1}


@pytest.mark.parametrize("status", [503, 507])
def test_a_service_on_a_full_disk_gets_the_report_once_it_has_space(peer: Peer, tmp_path: Path, status: int) -> None:
    peer.behaviours = [says(status, "no space left", Retry_After="30")]
    assert delivery_of(start_node(tmp_path, peer.url, report()))["queued"] == 1
    assert delivery_of(start_node(tmp_path, peer.url))["sent"] == 1


def test_nodes_report_while_postgresql_is_killed_and_comes_back(
    place: Place, tmp_path: Path, postgres: Postgres, postgres_url: str
) -> None:
    place.more["KB_DATABASE_URL"] = postgres_url
    names = [f"node-{number}" for number in range(8)]
    with reported(place) as (replica, key, arrived):
        assert delivery_of(start_node(tmp_path / "first", replica.url, report("first"), KB_API_KEY=key))["sent"] == 1
        postgres.kill()
        nodes = [start_node(tmp_path / name, replica.url, report(name), KB_API_KEY=key) for name in names]
        said = [delivery_of(node) for node in nodes]
        assert [(one["sent"], one["queued"]) for one in said] == [(0, 1)] * len(names), said
        assert replica.get("/v1/search?q=nccl+timeout")[0] == 200
        postgres.start()
        wait_for(lambda: replica.get("/v1/reports")[0] == 200, "the service to have its database back")
        nodes = [start_node(tmp_path / name, replica.url, KB_API_KEY=key) for name in names]
        assert [delivery_of(node)["sent"] for node in nodes] == [1] * len(names)
        assert arrived() == dict.fromkeys(["first", *names], 1)


def test_postgresql_killed_in_the_middle_of_many_reports_costs_none_of_them(
    place: Place, tmp_path: Path, postgres: Postgres, postgres_url: str
) -> None:
    place.more["KB_DATABASE_URL"] = postgres_url
    with reported(place) as (replica, key, arrived):
        reports = [report(f"entry-{number}") for number in range(100)]
        node = start_node(tmp_path, replica.url, *reports, KB_API_KEY=key)
        wait_for(lambda: waiting(tmp_path, replica.url) in range(1, 90), "the first reports")
        postgres.kill()
        restart = threading.Timer(1, postgres.start)
        restart.start()
        delivery_of(node)
        restart.join(60)
        wait_for(lambda: replica.get("/v1/reports")[0] == 200, "the service to have its database back")
        delivery_of(start_node(tmp_path, replica.url, KB_API_KEY=key))
        assert arrived() == {f"entry-{number}": 1 for number in range(100)}
