"""What watchdogs and launchers print of each rank, and the sentences over all of them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from kb.diagnose.evidence import Line
from kb.diagnose.scan.log_prefix import parse_prefix
from kb.diagnose.scan.result import Scan
from kb.diagnose.watchdog import WatchdogReader, derive_observations

PRINTED = "[E1121 03:14:05.118 ProcessGroupNCCL.cpp:683] [Rank {within}] {caught}"
THREAD = "[E1121 03:14:06.222 ProcessGroupNCCL.cpp:2057] [PG ID 1 PG GUID {group} Rank {within}] {caught}"
CAUGHT = "Watchdog caught collective operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, {sizes}, Timeout(ms)=9) ran"
STATUS = "[PG ID 0 PG GUID 0(default_pg) Rank {rank}] PG status: last enqueued work: 9, last completed work: {done}"


def timed_out(rank: int, seq: int = 7, op: str = "ALLREDUCE", size: int = 4, out: int | None = None) -> str:
    sizes = f"NumelIn={size}, NumelOut={size if out is None else out}"
    return f"[rank{rank}]:" + PRINTED.format(within=rank, caught=CAUGHT.format(seq=seq, op=op, sizes=sizes))


def in_group(rank: int, within: int, group: str, seq: int, op: str = "ALLREDUCE") -> list[str]:
    """Both lines that a rank prints of a group other than the default one; only the second names it."""
    caught = CAUGHT.format(seq=seq, op=op, sizes="NumelIn=4, NumelOut=4")
    messages = (PRINTED.format(within=within, caught=caught), THREAD.format(group=group, within=within, caught=caught))
    return [f"[rank{rank}]:{message}" for message in messages]


def scanned(lines: Iterable[str], ranks: Iterable[int] = ()) -> Scan:
    reading = WatchdogReader()
    for number, text in enumerate(lines, 1):
        rank, time, rest = parse_prefix(text)
        reading.read_line(Line("job.log", number, rest, rank, time), rest)
    timeouts = tuple(reading.timeouts.values())
    named = tuple(sorted({*ranks, *(timeout.rank for timeout in timeouts)}))
    progress, exits = tuple(reading.progress.values()), tuple(reading.exits)
    return Scan(timeouts=timeouts, progress=progress, exits=exits, ranks=named)


def observed(lines: Iterable[str], ranks: Iterable[int] = ()) -> list[tuple[str, int | None, int]]:
    items = list(derive_observations(scanned(lines, ranks)))
    assert all(line.text.startswith("kb: ") for line in items)
    return [(line.text.removeprefix("kb: "), line.rank, line.number) for line in items]


def test_ranks_that_wait_in_one_collective_are_one_sentence() -> None:
    assert observed([timed_out(rank) for rank in range(3)]) == [
        ("3 ranks timed out in the same collective, SeqNum=7 ALLREDUCE", None, 1)
    ]


def test_a_rank_that_did_not_wait_is_named_and_the_others_are_not_called_all() -> None:
    assert observed([timed_out(rank) for rank in (0, 1, 3)], ranks=[2]) == [
        ("rank 2 reported no timeout while 3 others waited in SeqNum=7 ALLREDUCE", 2, 1)
    ]


def test_several_that_did_not_wait_are_all_named() -> None:
    ((text, _, _),) = observed([timed_out(rank) for rank in (0, 1, 3, 4, 5)], ranks=[2, 6])
    assert text.startswith("rank 2, 6 reported no timeout while 5 others waited")


def test_where_most_ranks_said_nothing_nobody_is_accused() -> None:
    assert observed([timed_out(0)], ranks=range(8)) == []


def test_the_first_collective_of_all_points_to_transport_or_setup() -> None:
    assert observed([timed_out(0, seq=1), timed_out(1, seq=1)]) == [
        ("no collective ever completed: the first one of the job timed out", None, 1)
    ]


@pytest.mark.parametrize("none", ["-1", "0", str(2**64 - 1)])
def test_nothing_completed_is_read_from_the_status_as_well(none: str) -> None:
    lines = [timed_out(0, seq=2), "[rank0]:" + STATUS.format(rank=0, done=none)]
    assert observed(lines)[0][0].startswith("no collective ever completed")


def test_a_first_number_in_a_later_group_is_not_the_first_of_the_job() -> None:
    lines = [*in_group(0, 0, "5(tp)", 1), *in_group(1, 1, "5(tp)", 1), "[rank0]:" + STATUS.format(rank=0, done=41)]
    assert [text for text, _, _ in observed(lines)] == ["2 ranks timed out in the same collective, SeqNum=1 ALLREDUCE"]


def test_other_operations_at_one_number_are_divergence_and_the_lonely_rank_is_named() -> None:
    lines = [timed_out(rank, op="ALLGATHER" if rank == 2 else "ALLREDUCE") for rank in range(4)]
    assert observed(lines) == [
        (
            "ranks timed out in different collectives at SeqNum=7: ranks 0, 1 and 3 in ALLREDUCE, rank 2 in ALLGATHER",
            2,
            3,
        )
    ]


def test_of_two_ranks_that_differ_none_is_accused() -> None:
    ((_, rank, _),) = observed([timed_out(0, op="BROADCAST"), timed_out(1)])
    assert rank is None


def test_other_sizes_at_one_number_are_told_with_the_sizes() -> None:
    ((text, rank, number),) = observed([timed_out(rank, size=5 if rank == 1 else 4) for rank in range(4)])
    assert text.startswith("ranks timed out in ALLREDUCE of different sizes at SeqNum=7: ranks 0, 2 and 3 with")
    assert text.endswith("rank 1 with NumelIn=5 NumelOut=5")
    assert (rank, number) == (1, 2)


def test_the_sizes_of_older_releases_are_read_as_well() -> None:
    lines = [timed_out(0).replace("NumelIn=4, NumelOut=4", f"TensorShape=[{shape}]") for shape in ("2, 3",)]
    lines += [timed_out(1).replace("NumelIn=4, NumelOut=4", "TensorShape=[7]")]
    assert "rank 0 with NumelIn=6, rank 1 with NumelIn=7" in observed(lines)[0][0]


@pytest.mark.parametrize("op", ["ALLTOALL_BASE", "ALLTOALL", "GATHER", "SCATTER", "COALESCED"])
def test_sizes_that_may_differ_are_no_finding(op: str) -> None:
    assert observed([timed_out(rank, op=op, size=rank + 1) for rank in range(3)]) == []


def test_the_two_sides_of_a_transfer_are_no_divergence() -> None:
    assert observed([timed_out(0, op="SEND"), timed_out(1, op="RECV")]) == []


def test_ranks_at_other_numbers_are_told_with_their_numbers() -> None:
    assert observed([timed_out(rank, seq=5 if rank == 1 else 7) for rank in range(4)]) == [
        ("ranks timed out at different collectives: SeqNum=5 on rank 1, SeqNum=7 on ranks 0, 2 and 3", 1, 2)
    ]


def test_what_follows_the_first_timeout_of_a_rank_is_not_compared() -> None:
    lines = [timed_out(0), timed_out(1), timed_out(1, seq=8, op="BROADCAST")]
    assert [text for text, _, _ in observed(lines)] == ["2 ranks timed out in the same collective, SeqNum=7 ALLREDUCE"]


def test_groups_of_ranks_are_not_compared_with_each_other() -> None:
    lines = [line for rank in range(4) for line in in_group(rank, rank, "3(tp)", 500)]
    lines += [line for rank in range(4, 8) for line in in_group(rank, rank - 4, "7(tp)", 480, "BROADCAST")]
    assert [text for text, _, _ in observed(lines)] == [
        "4 ranks timed out in the same collective, SeqNum=500 ALLREDUCE",
        "4 ranks timed out in the same collective, SeqNum=480 BROADCAST",
    ]


def test_groups_that_share_a_name_say_nothing_together() -> None:
    lines = [line for rank in range(4) for line in in_group(rank, rank % 2, "3(mesh_tp)", 500 if rank < 2 else 480)]
    assert observed(lines) == []


def test_a_rank_that_is_known_only_within_its_group_is_not_taken_for_one_of_the_job() -> None:
    caught = CAUGHT.format(seq=1, op="ALLREDUCE", sizes="NumelIn=4, NumelOut=4")
    assert scanned([THREAD.format(group="3(tp)", within=1, caught=caught)]).timeouts == ()


ABORT = (
    "[rank{rank}]:[E1121 03:14:05.118 ProcessGroupNCCL.cpp:904] Aborting process on rank {rank} due to timeout - {why}"
)
WHY = "timeout watchdog detected operation timeout"


def test_a_rank_that_did_not_wait_is_named_where_no_operation_is_printed() -> None:
    lines = [ABORT.format(rank=rank, why=WHY) for rank in (0, 1, 3)]
    assert observed(lines, ranks=[2]) == [("rank 2 reported no timeout while 3 others waited", 2, 1)]


def test_without_an_operation_ranks_are_not_said_to_wait_in_the_same_one() -> None:
    assert observed([ABORT.format(rank=rank, why=WHY) for rank in range(4)]) == []


def test_a_line_without_a_prefix_names_its_rank() -> None:
    lines = [ABORT.format(rank=rank, why=WHY).partition("] ")[2] for rank in (0, 1)]
    assert [timeout.rank for timeout in scanned(lines).timeouts] == [0, 1]


def test_a_group_of_its_own_is_told_from_the_group_of_all() -> None:
    gave_up = "[rank{rank}]:[E1121 03:14:05.118 WorkNCCL.cpp:372] [TC][rank={within}][name={group}] Operation timed out after 600412 ms"
    lines = [gave_up.format(rank=rank, within=rank - 4, group="tp_1") for rank in (4, 5, 7)]
    assert [(timeout.rank, timeout.group) for timeout in scanned(lines).timeouts] == [
        (4, "tp_1"),
        (5, "tp_1"),
        (7, "tp_1"),
    ]
    assert observed(lines, ranks=[6]) == []  # who is in the group, no line says
    everyone = [gave_up.format(rank=rank, within=rank, group="default_pg") for rank in (0, 1, 3)]
    aborts = [ABORT.format(rank=rank, why=WHY) for rank in (0, 1, 3)]
    assert observed([*everyone, *aborts], ranks=[2]) == [("rank 2 reported no timeout while 3 others waited", 2, 1)]


def test_another_program_that_timed_out_is_no_rank() -> None:
    assert scanned(["curl: (28) Operation timed out after 10001 ms with 0 bytes received"]).timeouts == ()


def test_a_flood_of_other_lines_changes_nothing() -> None:
    assert observed(["step 1", "Watchdog", "SeqNum=1, OpType=ALLREDUCE", "[Rank 1] last enqueued work: x"] * 100) == []


def test_exits_are_read_from_the_summary_of_torchrun() -> None:
    summary = [
        "[0]:",
        "  time      : 2026-11-21_03:14:10",
        "  rank      : 12 (local_rank: 4)",
        "  exitcode  : -9 (pid: 71302)",
        "  exitcode  : 1 (pid: 1)",
    ]
    assert [(item.rank, item.code, item.line.number) for item in scanned(summary).exits] == [(12, -9, 4)]
