"""Sending: each report arrives once, one bad report holds up no other, and no service can hold up the sender."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kb.sharing import sender
from kb.sharing.client import Service
from kb.sharing.outbox import Outbox
from kb.sharing.sender import Delivery, send
from tests.support.console import wait_for
from tests.support.fake_service import (
    Behaviour,
    FakeService,
    drop,
    hang,
    listening,
    report,
    says,
    torn,
    trickle,
)
from tests.support.reporting_node import delivery_of, start_node


@pytest.fixture
def service() -> Iterator[FakeService]:
    with listening() as service:
        yield service


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox")


@pytest.fixture
def filled(outbox: Outbox, service: FakeService) -> Outbox:
    """Three reports wait for the service."""
    outbox.add(service.url, [report(name) for name in ("one", "two", "three")])
    return outbox


def ids(service: FakeService) -> list[str]:
    return sorted(json.loads(body)["id"] for body in service.kept.values())


def test_all_that_waits_is_sent_and_gone(filled: Outbox, service: FakeService) -> None:
    assert send(filled, Service.at(service.url)) == Delivery(sent=3)
    assert ids(service) == ["one", "three", "two"]
    assert not list(filled.directory.iterdir())
    assert send(filled, Service.at(service.url)) == Delivery()


def test_nothing_goes_to_a_service_that_it_was_not_queued_for(filled: Outbox, service: FakeService) -> None:
    with listening() as other:
        assert send(filled, Service.at(other.url)) == Delivery()
        assert not other.requests
    assert len(filled.waiting(service.url)) == 3


@pytest.mark.parametrize("behaviour", [drop, torn, says(500, "oops"), says(502, "<h1>", "text/html")])
def test_one_answer_that_is_lost_holds_up_no_other_and_is_replayed(
    filled: Outbox, service: FakeService, behaviour: Behaviour
) -> None:
    service.behaviours = [behaviour]
    first = send(filled, Service.at(service.url))
    assert (first.sent, first.queued, len(first.problems)) == (2, 1, 1)
    assert send(filled, Service.at(service.url)) == Delivery(sent=1)
    assert ids(service) == ["one", "three", "two"]
    assert len({request.key for request in service.requests}) == 3


def test_a_refused_report_goes_aside_and_the_others_arrive(filled: Outbox, service: FakeService) -> None:
    service.behaviours = [says(422, "it has no verdict")]
    delivery = send(filled, Service.at(service.url))
    assert (delivery.sent, delivery.queued, delivery.refused) == (2, 0, 1)
    assert "it has no verdict" in delivery.problems[0]
    assert str(filled.directory / "refused") in delivery.problems[0]
    (aside,) = (filled.directory / "refused").iterdir()
    assert "it has no verdict" in json.loads(aside.read_text())["problem"]


@pytest.mark.parametrize("status", [401, 403, 404, 302])
def test_when_none_can_be_taken_one_try_is_enough_and_all_wait(
    filled: Outbox, service: FakeService, status: int
) -> None:
    service.behaviours = [says(status)] * 3
    delivery = send(filled, Service.at(service.url))
    assert (delivery.sent, delivery.queued, delivery.refused) == (0, 3, 0)
    assert len(service.requests) == len(delivery.problems) == 1


@pytest.mark.parametrize("status", [429, 503])
def test_a_busy_service_is_asked_again_with_the_same_key(filled: Outbox, service: FakeService, status: int) -> None:
    service.behaviours = [says(status, Retry_After="0"), says(status, Retry_After="1")]
    begun = time.monotonic()
    assert send(filled, Service.at(service.url)) == Delivery(sent=3)
    assert time.monotonic() - begun >= 1, "it did not wait as long as it was asked to"
    assert len({request.key for request in service.requests[:3]}) == 1


def test_a_service_that_stays_busy_is_left_alone(filled: Outbox, service: FakeService) -> None:
    service.behaviours = [says(503, "the store is away", Retry_After="0")] * 9
    delivery = send(filled, Service.at(service.url))
    assert (delivery.sent, delivery.queued) == (0, 3)
    assert len(service.requests) == sender.MAX_ATTEMPTS
    assert "the store is away" in delivery.problems[0]


def test_a_wait_beyond_the_budget_is_not_begun(filled: Outbox, service: FakeService) -> None:
    service.behaviours = [says(429, "too many", Retry_After="3600")]
    assert send(filled, Service.at(service.url)).queued == 3
    assert len(service.requests) == 1


@pytest.mark.parametrize("behaviour", [hang, trickle])
def test_a_service_that_never_ends_its_answer_is_given_up(
    filled: Outbox, service: FakeService, behaviour: Behaviour
) -> None:
    service.behaviours = [behaviour] * 9
    delivery = send(filled, Service.at(service.url), budget_s=0.5)
    assert (delivery.sent, delivery.queued) == (0, 3)
    assert delivery.problems


def test_a_service_that_is_away_costs_one_try(filled: Outbox, service: FakeService) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        filled.add(url, [report("four"), report("five")])
        delivery = send(filled, Service.at(url))
    assert delivery == Delivery(queued=2, problems=(f"{url} cannot be reached: Connection refused",))


def test_an_outbox_that_cannot_be_read_is_part_of_the_delivery(outbox: Outbox) -> None:
    outbox.directory.write_text("mine")
    delivery = send(outbox, Service.at("http://127.0.0.1:9"))
    assert (delivery.sent, delivery.queued) == (0, 0)
    assert all("outbox" in problem for problem in delivery.problems)


def test_many_senders_of_one_outbox_send_each_report_in_one_try(outbox: Outbox, service: FakeService) -> None:
    outbox.add(service.url, [report(f"entry-{number}") for number in range(40)])
    senders = [start_node(outbox.directory, service.url) for _ in range(4)]
    assert sum(delivery_of(sender)["sent"] for sender in senders) == 40
    assert len(service.requests) == len(service.kept) == 40
    assert not outbox.waiting(service.url)


def test_a_report_that_one_sender_is_sending_is_left_to_it(outbox: Outbox, service: FakeService) -> None:
    outbox.add(service.url, [report()])
    service.behaviours = [hang]
    first = start_node(outbox.directory, service.url)
    try:
        wait_for(lambda: service.requests, "the first sender to send")
        assert send(outbox, Service.at(service.url)) == Delivery(queued=1)
        assert len(service.requests) == 1
    finally:
        first.kill()
        delivery_of(first)
    assert send(outbox, Service.at(service.url)) == Delivery(sent=1)
