"""Flight records compared: who never came, who disagreed, and where everybody waits."""

from __future__ import annotations

from typing import Any

import pytest

from kb.harness.flight_compare import compare, find_mismatches


def call(seq: int, op: str = "gloo:all_reduce", size: int = 4, **more: Any) -> dict[str, Any]:
    return {"group": "0", "seq": seq, "op": op, "sizes": [[size]], "dtypes": ["Float"], "retired": True, **more}


def open_call(seq: int, **more: Any) -> dict[str, Any]:
    return call(seq, **{"op": "nccl:all_reduce", "retired": False, "state": "started", **more})


def done(seq: int, **more: Any) -> dict[str, Any]:
    return call(seq, **{"op": "nccl:all_reduce", "state": "completed", **more})


def test_a_rank_that_never_came_is_named_with_the_collective() -> None:
    mismatches = compare({0: [call(1), call(2)], 1: [call(1)]}, 2)
    assert mismatches == ("rank 1 never issued collective 2 (all_reduce [4] Float), which rank 0 is in",)


def test_several_that_never_came_are_named_in_runs() -> None:
    came, late = [call(1), call(2)], [call(1)]
    mismatches = compare({rank: came if rank in (1, 6) else late for rank in range(8)}, 8)
    assert mismatches[0].startswith("ranks 0, 2-5 and 7 never issued collective 2 ")
    assert mismatches[0].endswith(", which rank 1 is in")


def test_different_sizes_at_a_sequence_number_are_distinguished() -> None:
    mismatches = compare({0: [call(1, size=4)], 1: [call(1, size=5)]}, 2)
    assert mismatches[0] == "collective 1 differs: rank 0 all_reduce [4] Float; rank 1 all_reduce [5] Float"


def test_the_minority_is_accused_of_a_difference_and_neither_of_two_is() -> None:
    many = find_mismatches({0: [call(1)], 1: [call(1, size=5)], 2: [call(1)]})
    assert many[0].ranks == (1,)
    assert find_mismatches({0: [call(1)], 1: [call(1, size=5)]})[0].ranks == ()


def test_ranks_that_agree_say_nothing() -> None:
    assert compare({0: [call(1)], 1: [call(1)]}, 2) == ()


def test_a_rank_without_a_record_is_mentioned_and_accused_of_nothing() -> None:
    assert compare({0: [call(1)], 2: [call(1)]}, 3) == ("no flight record from rank 1",)
    assert compare({0: [call(1)]}, 2) == ()


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({"op": "nccl:all_to_all", "sizes": [[3]]}, {"op": "nccl:all_to_all", "sizes": [[5]]}),
        ({"op": "gloo:scatter", "sizes": [[2], [2]]}, {"op": "gloo:scatter", "sizes": []}),
        ({"op": "gloo:gather", "outputs": [[2], [2]]}, {"op": "gloo:gather", "outputs": []}),
        ({"op": "nccl:broadcast", "dtypes": ["Float"]}, {"op": "nccl:broadcast", "dtypes": ["Half"]}),
        ({"op": "nccl:reduce", "outputs": [[4]]}, {"op": "nccl:reduce", "outputs": [[1]]}),
        ({"op": "nccl:reduce_scatter_v", "sizes": [[3]]}, {"op": "nccl:reduce_scatter_v", "sizes": [[5]]}),
    ],
)
def test_sizes_that_each_rank_rightly_has_for_itself_are_no_difference(
    first: dict[str, Any], other: dict[str, Any]
) -> None:
    assert compare({0: [call(1, **first)], 1: [call(1, **other)]}, 2) == ()


def test_point_to_point_calls_and_ends_of_coalesced_ones_are_nobody_elses_business() -> None:
    alone = [call(1, op="nccl:send 0->1", p2p=True), call(2, op="nccl:coalesced")]
    assert compare({0: [call(1), *alone], 1: [call(1)]}, 2) == ()


def test_a_prefix_that_the_ring_buffer_has_overwritten_was_issued_all_the_same() -> None:
    early = [call(seq, record_id=seq - 1) for seq in range(1, 8)]
    assert compare({0: early, 1: early[4:]}, 2) == ()
    mismatches = compare({0: early, 1: early[4:6]}, 2)
    assert mismatches[0].startswith("rank 1 never issued collective 7 ")


def test_a_rank_whose_records_of_a_group_are_overwritten_is_not_accused() -> None:
    group: dict[str, Any] = {"group": "5:tp"}
    records = {0: [call(3), call(1, **group)], 1: [call(3, record_id=2000)]}
    assert find_mismatches(records, {"5:tp": {0, 1}}) == []
    accused = find_mismatches(records, {"5:tp": {0, 1}}, {(1, "5:tp"): 0})
    assert accused[0].text.startswith(
        "rank 1 never issued collective 1 (all_reduce [4] Float) of group 5:tp, which rank 0"
    )


def test_only_members_of_a_group_are_missed() -> None:
    group: dict[str, Any] = {"group": "5:tp"}
    records = {0: [call(1), call(1, **group)], 1: [call(1), call(1, **group)], 2: [call(1)]}
    assert find_mismatches(records) == []
    assert find_mismatches(records, {"5:tp": {0, 1}}) == []
    assert find_mismatches(records, {"5:tp": {0, 1, 2}})[0].ranks == (2,)


def test_all_ranks_in_the_same_collective_point_at_no_rank() -> None:
    records = {rank: [done(1), done(2), open_call(3)] for rank in range(3)}
    assert [finding.text for finding in find_mismatches(records)] == [
        "all ranks are in collective 3 (all_reduce [4] Float) with the same sizes, none has completed it"
    ]


def test_what_is_queued_behind_a_collective_that_nobody_completed_accuses_nobody() -> None:
    records = {0: [done(1), open_call(2), open_call(3)], 1: [done(1), open_call(2)]}
    assert [finding.ranks for finding in find_mismatches(records)] == [()]


def test_a_job_whose_first_collective_never_completed_is_recognized() -> None:
    mismatches = compare({rank: [open_call(1, frames=["train.py:7 main"])] for rank in range(2)}, 2)
    assert mismatches[1] == "no collective ever completed, the first was all_reduce [4] Float (train.py:7 main)"
    later = {rank: [open_call(1), done(1, group="tp")] for rank in range(2)}
    assert not any("ever completed" in text for text in compare(later, 2))


def test_the_line_that_waits_is_named_and_so_are_earlier_calls_from_different_lines() -> None:
    def at(*places: str) -> dict[str, Any]:
        return {"frames": [f"train.py:{place}" for place in places]}

    zero = [
        done(1, **at("9 add", "20 step")),
        done(2, **at("9 add", "21 step")),
        open_call(3, **at("9 add", "22 step")),
    ]
    item = [done(1, **at("9 add", "20 step")), done(2, **at("9 add", "22 step"))]
    assert compare({0: zero, 1: item}, 2) == (
        "rank 1 never issued collective 3 (all_reduce [4] Float), which rank 0 is in (train.py:9 add)",
        "collective 2 (all_reduce [4] Float) was called from different lines: "
        "rank 0 from train.py:21 step; rank 1 from train.py:22 step",
    )


def test_a_broadcast_is_commonly_written_on_either_side_of_a_condition() -> None:
    zero = [done(1, op="nccl:broadcast", frames=["a.py:1 f"]), open_call(2)]
    item = [done(1, op="nccl:broadcast", frames=["a.py:3 f"])]
    assert len(compare({0: zero, 1: item}, 2)) == 1


def test_the_group_that_explains_the_others_comes_first() -> None:
    tp, dp = {"group": "1:tp"}, {"group": "2:dp"}
    records = {
        0: [open_call(1, time_created_ns=100, **dp)],  # waits for 1, which waits for 2
        1: [open_call(1, time_created_ns=200, **tp)],
        2: [done(1, time_created_ns=50)],
    }
    message = find_mismatches(records, {"1:tp": {1, 2}, "2:dp": {0, 1}})
    assert [finding.ranks for finding in message] == [(2,), (1,)]


def test_a_rank_is_not_in_a_collective_that_it_has_finished() -> None:
    mismatches = compare({0: [done(1), done(2)], 1: [done(1)]}, 2)
    assert mismatches == ("rank 1 never issued collective 2 (all_reduce [4] Float), which rank 0 has finished",)


def test_a_difference_in_the_outputs_alone_is_shown() -> None:
    mismatches = compare({0: [call(1, outputs=[[8]])], 1: [call(1, outputs=[[12]])]}, 2)
    assert mismatches[0].endswith("rank 0 all_reduce [4] Float -> [8]; rank 1 all_reduce [4] Float -> [12]")


def test_a_rank_that_came_after_the_others_timeout_is_called_late() -> None:
    on_time, late = (call(1, time_created_ns=int(at * 1e9), timeout_ms=2000) for at in (100.0, 103.5))
    (output,) = find_mismatches({0: [late], 1: [on_time]})
    assert output.text == "rank 0 came to collective 1 (all_reduce [4] Float) 3.5 s after rank 1, which waits for 2.0 s"
    assert output.ranks == (0,)


def test_a_rank_that_came_within_the_timeout_is_not_late() -> None:
    item, other = (call(1, time_created_ns=int(at * 1e9), timeout_ms=2000) for at in (100.0, 101.5))
    assert find_mismatches({0: [item], 1: [other]}) == []


def test_of_gloo_ranks_that_run_ahead_without_waiting_nobody_is_accused() -> None:
    ahead = [call(seq, time_created_ns=100 + seq) for seq in (1, 2, 3)]
    (output,) = find_mismatches({0: ahead, 1: [call(1, time_created_ns=200)]})
    assert output.text == (
        "all ranks are in collective 1 (all_reduce [4] Float) with the same sizes, none has completed it, on gloo"
    )
    assert output.ranks == ()


def test_a_gloo_rank_that_is_waited_for_is_accused() -> None:
    ahead = [call(1, time_created_ns=100), call(2, time_created_ns=300)]
    (output,) = find_mismatches({0: ahead, 1: [call(1, time_created_ns=200)]})
    assert output.ranks == (1,)
