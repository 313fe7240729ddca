"""Sentences about the processes of a capture: the odd rank, what it does, and no claim about a job that goes on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.first_failure import ABSENT
from kb.diagnose.readers.capture_comparison import CaptureRecords
from kb.diagnose.readers.structured import Unreadable
from tests.support.capture_records import GATHERS, LOADS, REDUCES, SLEEPS, busy, encoded, node, record, sample, stack

WAITING = [record(rank) for rank in (0, 2, 3)]


def compared(*documents: dict[str, Any]) -> list[tuple[int | None, str]]:
    records = CaptureRecords()
    for document in documents:
        records.add(encoded(document), "bundle", 100_000)
    return [(line.rank, line.text.removeprefix("kb: ")) for line in records.compare()]


def first(*documents: dict[str, Any]) -> tuple[int | None, str]:
    return compared(*documents)[0]


def test_the_rank_outside_of_a_collective_is_named_first_with_what_it_uses() -> None:
    (rank, text), (_, use) = compared(*WAITING, record(1, SLEEPS))
    assert rank == 1
    assert text == (
        "rank 1 is in train.py:24 prepare_eval, in no collective, "
        "while ranks 0, 2 and 3 are in all_reduce called from train.py:14 step"
    )
    assert use == "rank 1 used no CPU and read nothing in 3.0 s"
    match = ABSENT.search(text)
    assert match is not None
    assert match[1] == "1"


def test_a_spinning_rank_stands_in_one_function() -> None:
    _, (_, use) = compared(*WAITING, record(1, **busy(SLEEPS)))
    assert use == "rank 1 used 2.9 s of CPU in 3.0 s and stands in the same function"


def test_a_rank_in_another_collective_is_odd_if_most_are_in_one() -> None:
    rank, text = first(*WAITING, record(1, GATHERS))
    assert rank == 1
    assert "all_gather called from train.py:30 log, not with the others, while ranks 0, 2 and 3" in text


def test_two_against_two_are_both_named_and_none_is_accused() -> None:
    given_ = [record(rank, REDUCES if rank < 2 else GATHERS) for rank in range(4)]
    (line,) = compared(*given_)
    assert line[0] is None
    assert line[1].startswith("ranks wait in different collectives: ranks 0 and 1 are in all_reduce")
    assert ABSENT.search(line[1]) is None


def test_all_in_one_collective_points_to_nobody() -> None:
    (line,) = compared(*WAITING, record(1))
    assert line == (
        None,
        "ranks 0-3 are in the same collective: all_reduce called from train.py:14 step, and none moved in 3.0 s",
    )
    assert ABSENT.search(line[1]) is None


def moving(rank: int) -> dict[str, Any]:
    return record(rank, samples=[sample(0), sample(3, 0.2, 80)])


def test_a_job_that_goes_on_has_no_culprit() -> None:
    """Between the samples the main threads ran, although both found them in the same place."""
    (line,) = compared(*map(moving, (0, 2, 3)), record(1, SLEEPS, samples=[sample(0), sample(3, 0.1, 99)]))
    assert line[1].startswith("ranks 0-3 ran on between two samples")
    stacks = [stack(*REDUCES), stack("forward (train.py:40)")]
    (line,) = compared(*(record(rank, stacks=stacks) for rank in range(4)))
    assert "not at a standstill" in line[1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"samples": [sample(0), sample(3, state="T")]}, "rank 1 is stopped (state T, `kill -CONT 101` continues it)"),
        ({"samples": [sample(0), sample(3, tracer=77)]}, "rank 1 is traced by process 77"),
        (
            {"samples": [sample(at, state="D", wchan="nfs4_wait") for at in (0, 3)]},
            "rank 1 is in uninterruptible sleep in nfs4_wait",
        ),
    ],
)
def test_a_rank_that_something_holds_is_named_wherever_it_is(more: dict[str, Any], expected: str) -> None:
    rank, text = first(*WAITING, record(1, **more))
    assert rank == 1
    assert text.startswith(expected)
    assert ABSENT.search(text) is not None
    assert len(compared(*WAITING, record(1, **more))) == 1, "nothing is said of the collective that it does not finish"


def test_one_sample_in_uninterruptible_sleep_is_ordinary_reading() -> None:
    rank, text = first(*WAITING, record(1, SLEEPS, samples=[sample(0, state="D"), sample(3)]))
    assert (rank, "uninterruptible" in text) == (1, False)


def test_the_worker_that_keeps_a_rank_waiting_is_named_and_an_idle_one_is_not() -> None:
    decoding = ("decode (data.py:9)", "_worker_loop (torch/utils/data/_utils/worker.py:349)")
    idle = (
        "select (selectors.py:415)",
        "get (multiprocessing/queues.py:113)",
        "_worker_loop (torch/utils/data/_utils/worker.py:3)",
    )
    children = [
        {"pid": pid, "command": "python", "samples": [sample(0), sample(3)], "stacks": [stack(*frames)] * 2}
        for pid, frames in ((7, idle), (8, decoding))
    ]
    texts = [text for _, text in compared(*WAITING, record(1, LOADS, children=children))]
    assert "in the DataLoader called from train.py:12 step, in no collective" in texts[0]
    assert texts[2:] == [
        "rank 1 has the worker process 8, which is in data.py:9 decode, and used no CPU and read nothing in 3.0 s"
    ]


def test_the_holder_of_a_lock_is_named() -> None:
    texts = [text for _, text in compared(*WAITING, record(1, SLEEPS), node(locks=[{"pid": 101, "holder": 55}]))]
    assert "rank 1 waits for the lock of a file, which process 55 holds" in texts


def test_a_rank_without_a_stack_is_not_looked_at_and_not_absent() -> None:
    records = CaptureRecords()
    refused = record(1, (), errors={"stack-1": "ptrace is refused: run as root"})
    for document in (*WAITING, refused):
        records.add(encoded(document), "bundle", 100_000)
    assert list(records.problems()) == ["bundle: no stack of rank 1: ptrace is refused: run as root"]
    assert not any(ABSENT.search(line.text) for line in records.compare())


def test_without_any_stack_only_states_are_told() -> None:
    assert compared(*(record(rank, ()) for rank in range(4))) == []
    assert (
        first(*(record(rank, ()) for rank in (0, 2)), record(1, (), samples=[sample(0), sample(3, state="T")]))[0] == 1
    )


def test_a_single_process_is_described() -> None:
    texts = [text for _, text in compared(record(None, SLEEPS))]
    assert texts == ["process 100 is in train.py:24 prepare_eval", "process 100 used no CPU and read nothing in 3.0 s"]


SOCKETS = """\
ESTAB 0 0 127.0.0.1:40000 127.0.0.1:29500 users:(("python",pid={0},fd=3))
\t cubic rtt:0.1 lastsnd:9 lastrcv:5 lastack:5
ESTAB 0 0 127.0.0.1:40001 127.0.0.1:40002 users:(("python",pid={0},fd=4))
\t cubic rtt:0.1 lastsnd:31000 lastrcv:31072 lastack:31000"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"ranks": [{"rank": rank} for rank in (0, 1, 3)]}, "rank 2 of 4 has no process on this node"),
        (
            {"ranks": [{"rank": 4}], "job": {"world_size": 8, "local_size": 4}},
            "3 of the 4 ranks of this node have no process",
        ),
        (
            {"file_systems": [{"folder": "/dev/shm", "bytes": 64 << 20, "free": 0}]},
            "/dev/shm is full: 0 MiB of 64 are free",
        ),
        (
            {"steps": [{"step": "gpus", "where": "node", "seconds": 8.02, "error": "did not return in 8.0 s"}]},
            "nvidia-smi did not answer in 8 s",
        ),
        (
            {
                "steps": [
                    {"step": "file-system /data", "where": "node", "seconds": 3.0, "error": "did not return in 3.0 s"}
                ]
            },
            "the file system of /data did not answer in 3 s",
        ),
        (
            {"tools": {"sockets": "\n".join(SOCKETS.format(100 + rank) for rank in range(4))}},
            "ranks 0-3 have heard nothing from their peers for 31 s",
        ),
    ],
)
def test_what_a_node_says(more: dict[str, Any], expected: str) -> None:
    assert expected in [text for _, text in compared(*(record(rank) for rank in range(4)), node(**more))]


def test_processes_that_the_kernel_killed_are_counted() -> None:
    facts = {"cgroup_files": {"memory.events": "low 0\noom 2\noom_kill 2\n"}}
    assert "the cgroup of rank 1 counts 2 oom_kill" in [text for _, text in compared(record(1, facts=facts), node())]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=8), values, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(sorted({*record(1), *node(), "locks", "facts", "file_systems"})), JSON))
def test_nonsense_raises_nothing_else(changed: dict[str, Any]) -> None:
    for base in (record(1, SLEEPS), node()):
        document = {**base, **changed}
        try:
            compared(*WAITING, document)
        except Unreadable:
            continue


def over_nodes(*nodes: dict[str, Any]) -> list[str]:
    records = [record(rank, node=f"node-{rank // 2}") for rank in range(2)]
    return [text for _, text in compared(*records, *nodes)][1:]


NODES = [node(ranks=[{"rank": 0}, {"rank": 1}]), node(node="node-1", ranks=[], job={"world_size": None})]


def test_ranks_of_a_node_that_did_not_answer_were_not_looked_at() -> None:
    here, silent = NODES[0], {**NODES[1], "reason": "Connection refused"}
    (text,) = over_nodes(here, silent)
    assert text == "node-1 did not answer: ranks 2 and 3 of 4 were not looked at"
    assert ABSENT.search(text) is None
    records = CaptureRecords()
    records.add(encoded(silent), "bundle/node-1/node.json", 100_000)
    assert list(records.problems()) == ["bundle/node-1/node.json: no answer: Connection refused"]


def test_ranks_that_are_on_no_node_are_missing() -> None:
    assert over_nodes(*NODES) == ["ranks 2 and 3 of 4 have no process on any of the 2 nodes"]


def test_nodes_of_several_bundles_say_nothing_of_missing_ranks() -> None:
    assert over_nodes(NODES[0], {**NODES[1], "node": "node-0"}) == []


def test_a_tool_that_did_not_return_is_one_of_its_node() -> None:
    steps = [{"step": "gpus", "where": "node", "error": "did not return in 8.0 s", "seconds": 8.0}]
    texts = over_nodes(node(), node(node="node-1", steps=steps))
    assert texts == ["nvidia-smi did not answer in 8 s on node-1"]
