"""Senders and services are killed, disks are full, the database is away: each report still arrives, and once."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kb.sharing.outbox import Outbox
from kb.store import keys
from tests.support.console import wait_for
from tests.support.fake_service import FakeService, drop, keep_and_hang, listening, report
from tests.support.programs import program
from tests.support.replicas import Place, Replica, started
from tests.support.reporting_node import delivery_of, start_node

if TYPE_CHECKING:
    from tests.support.postgres_server import Server as Postgres

pytestmark = pytest.mark.slow

pytest_plugins = ["tests.support.postgres_fixtures"]
NODES = 20
SMALL_DISK = 40 << 10  # bytes of one file: less than the store has, so that its journal has room for few reports
Arrived = Callable[[], Counter[str]]


@pytest.fixture
def service() -> Iterator[FakeService]:
    with listening() as service:
        yield service


def waiting(directory: Path, url: str) -> int:
    return len(Outbox(directory).waiting(url))


def test_a_sender_killed_before_any_of_its_actions_loses_nothing_and_sends_nothing_twice(
    service: FakeService, tmp_path: Path
) -> None:
    actions = delivery_of(start_node(tmp_path / "whole", service.url, report()))["actions"]
    assert actions > 8
    unfinished = 0
    for number in range(1, actions + 1):
        directory, entry_id = tmp_path / str(number), f"killed-at-{number}"
        assert delivery_of(start_node(directory, service.url, report(entry_id), KILL_AT=str(number))) == {}
        was_queued = waiting(directory, service.url) == 1
        has_arrived = [json.loads(body)["id"] for body in service.kept.values()].count(entry_id)
        unfinished += was_queued
        assert delivery_of(start_node(directory, service.url))["sent"] == was_queued
        arrived = [json.loads(body)["id"] for body in service.kept.values()].count(entry_id)
        assert arrived == max(was_queued, has_arrived)
        assert waiting(directory, service.url) == 0
    assert unfinished > 4


def test_a_sender_killed_while_it_waits_for_the_answer_sends_again_under_the_same_key(
    service: FakeService, tmp_path: Path
) -> None:
    service.behaviours = [keep_and_hang]
    node = start_node(tmp_path, service.url, report())
    wait_for(lambda: service.kept, "the service to have the report")
    node.kill()
    assert delivery_of(node) == {}
    assert delivery_of(start_node(tmp_path, service.url))["sent"] == 1
    assert len(service.requests) == 2
    assert len(service.kept) == 1


def test_a_service_that_loses_every_answer_has_each_report_once(service: FakeService, tmp_path: Path) -> None:
    service.behaviours = [drop] * 3
    lost = delivery_of(start_node(tmp_path, service.url, *(report(f"entry-{number}") for number in range(3))))
    assert (lost["sent"], lost["queued"]) == (0, 3)
    assert delivery_of(start_node(tmp_path, service.url))["sent"] == 3
    assert len(service.kept) == 3


@contextmanager
def reported(place: Place, scope: str = "report") -> Iterator[tuple[Replica, str, Arrived]]:
    """(a real service, a key for it, how often each report arrived there)."""
    key, reader = place.key(scope), place.key("read")
    with started(place) as replica:

        def arrived() -> Counter[str]:
            result: Counter[str] = Counter()
            page = "/v1/reports?limit=100"
            while page:
                status, document = replica.get(page, Authorization=f"Bearer {reader}")
                assert status == 200, document
                result.update(item["id"] for item in document["reports"])
                page = document["next"] and f"/v1/reports?limit=100&cursor={document['next']}"
            return result

        yield replica, key, arrived


@pytest.fixture
def place(tmp_path: Path, built_in_index: Path) -> Place:
    path = tmp_path / "service"
    path.mkdir()
    return Place(path, built_in_index)


def move(directory: Path, old: Replica, new: Replica) -> None:
    """What waits for a service waits for it at its new port."""
    for path in directory.glob("*.json"):
        path.write_text(path.read_text().replace(old.url, new.url))


def test_twenty_nodes_report_at_once_and_each_report_is_there_once(place: Place, tmp_path: Path) -> None:
    with reported(place) as (replica, key, arrived):
        nodes = [
            start_node(tmp_path / f"node-{number}", replica.url, report(f"node-{number}"), KB_API_KEY=key)
            for number in range(NODES)
        ]
        output = [delivery_of(node) for node in nodes]
        assert [item["sent"] for item in output] == [1] * NODES, output
        assert arrived() == {f"node-{number}": 1 for number in range(NODES)}


def test_a_service_killed_under_reports_has_each_once_after_it_is_back(place: Place, tmp_path: Path) -> None:
    key, directories = place.key("report"), [tmp_path / f"node-{number}" for number in range(4)]
    with started(place) as killed:
        url = killed.url
        nodes = [
            start_node(directory, url, *(report(f"{directory.name}-{item}") for item in range(10)), KB_API_KEY=key)
            for directory in directories
        ]
        wait_for(lambda: any(waiting(directory, url) in range(1, 9) for directory in directories), "the first reports")
        killed.process.kill()
        left = sum(delivery_of(node)["queued"] for node in nodes)
    assert left > 0, "it was killed too late to matter"
    with reported(place, "read") as (replica, _, arrived):
        for directory in directories:
            move(directory, killed, replica)
        nodes = [start_node(directory, replica.url, KB_API_KEY=key) for directory in directories]
        assert sum(delivery_of(node)["sent"] for node in nodes) == left
        assert arrived() == {f"{directory.name}-{item}": 1 for directory in directories for item in range(10)}


def test_a_revoked_key_keeps_the_reports_until_another_is_set(place: Place, tmp_path: Path) -> None:
    with reported(place) as (replica, key, arrived):
        with place.database() as database:
            keys.revoke(database, key.split("_")[1])
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
        output = delivery_of(
            start_node(tmp_path, replica.url, report(verdict="splendid"), report("sound"), KB_API_KEY=key)
        )
        assert (output["sent"], output["refused"], output["queued"]) == (1, 1, 0)
        assert arrived() == {"sound": 1}


def test_a_service_on_a_full_disk_gets_the_reports_once_it_has_space(place: Place, tmp_path: Path) -> None:
    key, names = place.key("report"), [f"entry-{number}" for number in range(40)]
    nodes, sent = [tmp_path / "node-1", tmp_path / "node-2"], 0
    with started(place, prefix=[program("prlimit"), f"--fsize={SMALL_DISK}"]) as full:
        for directory in nodes:
            reports = [report(f"{directory.name}-{name}") for name in names]
            output = delivery_of(start_node(directory, full.url, *reports, KB_API_KEY=key))
            assert output["queued"] > 0, output
            assert "503" in output["problems"][0]
            sent += output["sent"]
    with reported(place, "read") as (replica, _, arrived):
        assert sum(arrived().values()) == sent
        for directory in nodes:
            move(directory, full, replica)
            delivery_of(start_node(directory, replica.url, KB_API_KEY=key))
        assert arrived() == {f"{directory.name}-{name}": 1 for directory in nodes for name in names}


def test_nodes_report_while_postgresql_is_killed_and_comes_back(
    place: Place, tmp_path: Path, postgres: Postgres, postgres_url: str
) -> None:
    place.more["KB_DATABASE_URL"] = postgres_url
    names = [f"node-{number}" for number in range(4)]
    with reported(place) as (replica, key, arrived):
        assert delivery_of(start_node(tmp_path / "first", replica.url, report("first"), KB_API_KEY=key))["sent"] == 1
        postgres.kill()
        nodes = [start_node(tmp_path / name, replica.url, report(name), KB_API_KEY=key) for name in names]
        output = [delivery_of(node) for node in nodes]
        assert [(item["sent"], item["queued"]) for item in output] == [(0, 1)] * len(names), output
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
        postgres.start()
        delivery_of(node)
        wait_for(lambda: replica.get("/v1/reports")[0] == 200, "the service to have its database back")
        delivery_of(start_node(tmp_path, replica.url, KB_API_KEY=key))
        assert arrived() == {f"entry-{number}": 1 for number in range(100)}
