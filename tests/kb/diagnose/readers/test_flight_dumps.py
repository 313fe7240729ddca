"""The dumps of many ranks: what stays in memory, and what is still seen."""

from __future__ import annotations

import pickle
import tracemalloc
from typing import Any

from kb.diagnose.readers.flight_dumps import FlightDumps
from tests.support.flight_dumps import entry

RANKS = 400
FRAMES = [{"filename": f"train_{depth}.py", "line": depth, "name": "step"} for depth in range(10)]


def data_of(entries: list[dict[str, Any]], **fields: Any) -> bytes:
    return pickle.dumps({"version": "2.10", "entries": entries, **fields})


def collected(most: int, count: int, ranks: int = 4, last: int = 300) -> FlightDumps:
    """Every rank makes `count` collectives, of which rank 1 has only the first `last`."""
    dumps = FlightDumps(most)
    for rank in range(ranks):
        entries = [entry(seq) for seq in range(1, (last if rank == 1 else count) + 1)]
        dumps.add(data_of(entries), f"nccl_trace_rank_{rank}", 1_000_000)
    return dumps


def test_of_too_many_collectives_the_last_of_each_rank_are_compared_and_that_is_said() -> None:
    dumps = collected(600, 301)
    sentences = [line.text for line in dumps.compare()]
    assert sentences == ["rank 1 never issued collective 301 (all_reduce [4] Float), which rank 0 has finished"]
    problem = "nccl_trace_rank_0: 4 dumps have more than 600 collectives; the last 112 of each are compared"
    assert list(dumps.problems()) == [problem]
    assert sum(len(dump.records) for dump in dumps._dumps) <= 600


def test_a_rank_is_not_accused_of_a_group_whose_calls_were_forgotten() -> None:
    """Rank 1 used the group before everything that is left of its dump."""
    other = {"process_group": ("1", "mesh"), "pg_id": 1}
    dumps = FlightDumps(200)
    for rank in range(2):
        early = [entry(1, record_id=0, **other)]
        late = [entry(seq, record_id=seq) for seq in range(1, 190)]
        dumps.add(data_of([*early, *late] if rank else [*late, *early]), f"nccl_trace_rank_{rank}", 1_000_000)
    assert not [line.text for line in dumps.compare() if "mesh" in line.text]


def test_dumps_within_the_limit_are_compared_whole() -> None:
    dumps = collected(10_000, 301)
    assert len(dumps.compare()) == 1
    assert not list(dumps.problems())
    assert sum(len(dump.records) for dump in dumps._dumps) == 301 * 3 + 300


def test_what_all_ranks_have_in_common_is_in_memory_once() -> None:
    """Of a job of many ranks, every dump lists every rank of every group."""
    groups = {str(group): {"desc": "mesh", "ranks": str(list(range(3000)))} for group in range(8)}
    data = data_of([entry(seq, frames=FRAMES) for seq in range(1, 11)], pg_config=groups)
    dumps = FlightDumps(100_000)
    tracemalloc.start()
    try:
        for rank in range(RANKS):
            dumps.add(data, f"nccl_trace_rank_{rank}", 1_000_000)
        size, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert size < 16 << 20
    assert len(dumps._dumps) == RANKS
