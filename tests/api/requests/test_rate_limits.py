"""How often somebody may ask, on a clock that the test turns."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import Any

import pytest

from kb.errors import TooManyRequests, UsageError
from tests.support.clock import Clock

limits: Any = resolve_name("kb.api.requests.rate_limits")


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_of(limit: Any, name: str) -> float:
    """Seconds to wait; 0 when the request passed."""
    try:
        limit.take(name)
    except TooManyRequests as error:
        return error.retry_s
    return 0


def test_as_many_as_allowed_pass_at_once_and_the_next_when_it_was_told_to_come(clock: Clock) -> None:
    limit = limits.RateLimit(10, 60.0, clock)
    assert [wait_of(limit, "a") for _ in range(10)] == [0] * 10
    assert wait_of(limit, "a") == 6
    clock.now += 5.9
    assert wait_of(limit, "a") == 1
    clock.now += 0.1
    assert wait_of(limit, "a") == 0
    assert wait_of(limit, "a") == 6


def test_who_is_refused_and_asks_on_does_not_wait_longer(clock: Clock) -> None:
    limit = limits.RateLimit(1, 60.0, clock)
    assert wait_of(limit, "a") == 0
    assert {wait_of(limit, "a") for _ in range(100)} == {60}


def test_names_are_counted_apart(clock: Clock) -> None:
    limit = limits.RateLimit(1, 60.0, clock)
    assert [wait_of(limit, name) for name in ("a", "b", "a")] == [0, 0, 60]


def test_after_a_period_of_silence_all_is_allowed_again_and_no_more(clock: Clock) -> None:
    limit = limits.RateLimit(3, 60.0, clock)
    for _ in range(3):
        limit.take("a")
    clock.now += 3600.0
    assert [wait_of(limit, "a") for _ in range(4)] == [0, 0, 0, 20]


def test_what_is_remembered_is_bounded_and_who_asks_most_is_remembered_longest(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MOST_NAMES", 10)
    limit = limits.RateLimit(2, 60.0, clock)
    assert [wait_of(limit, "greedy") for _ in range(3)] == [0, 0, 30]
    for number in range(100):
        limit.take(f"client {number}")
    assert len(limit._full_at) <= 10
    assert wait_of(limit, "greedy") == 30


def test_a_quota_says_what_is_left_and_when_all_is(clock: Clock) -> None:
    limit = limits.RateLimit(3, 60.0, clock)
    assert limit.quota("a").headers() == [
        (b"ratelimit-policy", b'"default";q=3;w=60'),
        (b"ratelimit", b'"default";r=3;t=0'),
    ]
    for left in (2, 1, 0):
        limit.take("a")
        assert limit.quota("a").remaining == left
    assert limit.quota("a").reset_s == 60
    assert wait_of(limit, "a") == 20
    clock.now += 25
    assert (limit.quota("a").remaining, limit.quota("a").reset_s) == (1, 35)


@pytest.mark.parametrize(
    ("text", "amount", "seconds"), [("600/minute", 600, 60.0), ("5/second", 5, 1.0), (" 7 / hour ", 7, 3600.0)]
)
def test_a_rate_is_read_as_people_write_it(text: str, amount: int, seconds: float) -> None:
    limit = limits.RateLimit.parse(text)
    assert [wait_of(limit, "a") for _ in range(amount)] == [0] * amount
    assert 0 < wait_of(limit, "a") <= seconds


@pytest.mark.parametrize("text", ["many", "0/minute", "-1/minute", "5", "5/", "5/fortnight", "1.5/minute", "/minute"])
def test_what_is_no_rate_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError, match="invalid rate"):
        limits.RateLimit.parse(text)


def test_no_rate_limits_nothing() -> None:
    assert limits.RateLimit.parse("") is None


@pytest.mark.parametrize(
    ("address", "other", "is_same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("2001:db8::1", "2001:db8::ffff:1", True),  # one host has a whole /64
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("", "testclient", False),
        ("x" * 100_000, "x" * 100_000 + "y", True),  # what a proxy says of its client, kept for each of many
    ],
)
def test_a_client_is_an_address_or_a_network_of_ipv6(address: str, other: str, is_same: bool) -> None:
    assert (limits.client_network(address) == limits.client_network(other)) is is_same
