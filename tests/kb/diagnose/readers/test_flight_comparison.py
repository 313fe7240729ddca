"""What the dumps of several ranks say together."""

from __future__ import annotations

import time
from typing import Any

from kb.diagnose.readers.flight_comparison import compare_dumps
from kb.diagnose.readers.flight_recorder import FlightDump
from tests.support.flight_dumps import dump_of, entry


def sentences(*dumps: FlightDump) -> list[str]:
    return [line.text for line in compare_dumps(dumps)]


def test_a_member_without_a_dump_is_mentioned() -> None:
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1, 2, 3]"}}
    lines = compare_dumps([dump_of(rank, [entry(1)], pg_config=config) for rank in (0, 1)])
    assert [(line.text, line.rank) for line in lines] == [("no flight record from ranks 2 and 3", 2)]


def test_one_dump_says_nothing() -> None:
    assert sentences(dump_of(0, [entry(1, state="started", retired=False)])) == []


def test_ranks_without_records_are_judged_by_the_status_of_the_group() -> None:
    waiting = [entry(5, state="started", retired=False)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}

    def status(last: str) -> dict[str, dict[str, str]]:
        return {"0": {"last_enqueued_collective": last}}

    behind = dump_of(1, [], pg_config=config, pg_status=status("4"))
    assert sentences(dump_of(0, waiting, pg_config=config), behind) == [
        "rank 1 never issued collective 5 (all_reduce [4] Float), which rank 0 is in"
    ]
    there = dump_of(1, [], pg_config=config, pg_status=status("5"))
    assert sentences(dump_of(0, waiting, pg_config=config), there) == []


def test_the_latest_dump_of_a_rank_counts() -> None:
    waiting, arrived = [entry(1), entry(2)], [entry(1), entry(2)]
    assert sentences(dump_of(0, waiting), dump_of(1, arrived), dump_of(1, [entry(1)])) == []


def test_groups_that_a_split_gave_one_name_are_told_apart() -> None:
    def half(rank: int, ranks: str, size: int) -> FlightDump:
        config = {"3": {"name": "3", "desc": "tp", "ranks": ranks}}
        return dump_of(rank, [entry(1, process_group=("3", "tp"), input_sizes=[[size]])], pg_config=config)

    halves = [half(0, "[0, 1]", 4), half(1, "[0, 1]", 4), half(2, "[2, 3]", 5), half(3, "[2, 3]", 5)]
    assert sentences(*halves) == []
    halves[3] = half(3, "[2, 3]", 6)
    assert sentences(*halves)[0].startswith("collective 1 of group 3:tp (ranks 2 and 3) differs: rank 2 ")


def test_an_entry_that_contains_itself_is_compared() -> None:
    itself: dict[str, Any] = entry(1)
    itself["frames"] = itself["input_sizes"] = [itself]
    itself["input_sizes"].append(itself["input_sizes"])
    (sentence,) = sentences(dump_of(0, [itself, entry(2)]), dump_of(1, [itself]))
    assert sentence.startswith("rank 1 never issued collective 2 (all_reduce [4] Float), which rank 0 has finished")


def test_many_groups_of_many_ranks_cost_no_more_than_they_are_large() -> None:
    """These two dumps of 2 MB took minutes: each set of ranks was compared with each other set."""
    ranks = list(range(1 << 16))
    entries = [entry(1, process_group=[str(group), ""]) for group in range(5_000)]
    config = {str(group): {"ranks": ranks} for group in range(5_000)}
    began = time.thread_time()
    dumps = [dump_of(rank, entries, pg_config=config) for rank in (0, 1)]
    read = time.thread_time()
    assert sentences(*dumps) == ["no flight record from ranks 2-65535"]
    assert time.thread_time() - read < read - began < 60, "to compare them costs less than to read them"
