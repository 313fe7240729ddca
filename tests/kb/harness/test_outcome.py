"""Which rank failed first: by the clock, with the rank that only lost its peer behind the peer."""

from __future__ import annotations

from kb.harness.outcome import ArmOutcome, RankOutcome


def first(*ranks: RankOutcome) -> int | None:
    result = ArmOutcome(ranks=ranks).first_failure
    return None if result is None else result.rank


def raised(rank: int, message: str, ended: float) -> RankOutcome:
    return RankOutcome(rank, "raised", type="RuntimeError", message=message, ended=ended)


def test_the_earliest_failure_is_first() -> None:
    assert first(raised(0, "out of memory", 9.0), raised(1, "no such file", 8.0), RankOutcome(2, "completed")) == 1


def test_a_death_seen_late_comes_before_the_rank_that_lost_its_peer() -> None:
    lost = raised(0, "[pair.cc:553] Connection closed by peer [127.0.0.1]:4711", 8.0)
    assert first(lost, RankOutcome(1, "killed", signal="SIGSEGV", ended=8.4)) == 1


def test_a_rank_that_lost_its_peer_long_before_others_failed_is_first() -> None:
    lost = raised(0, "Connection reset by peer", 8.0)
    assert first(lost, raised(1, "assertion failed", 12.0)) == 0


def test_nobody_failed_first_where_nobody_failed() -> None:
    assert first(RankOutcome(0, "completed")) is None
