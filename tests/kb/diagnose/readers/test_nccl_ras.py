"""Reports of NCCL RAS: JSON and text as NCCL prints them (with other numbers), and nonsense."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.readers.nccl_ras import read_ras_report
from kb.diagnose.readers.structured import Unreadable


def rank(number: int, reduced: int = 7, **status: Any) -> dict[str, Any]:
    healthy = {"init_state": 0, "async_error": 0, "finalize_called": False, "destroy_flag": False, "abort_flag": False}
    return {
        "rank": number,
        "host": "10.0.0.5",
        "pid": 900 + number,
        "cuda_dev": number,
        "nvml_dev": number,
        "status": healthy | status,
        "collective_counts": {"Broadcast": 1, "AllReduce": reduced},
    }


def missing(number: int, unresponsive: bool = True, dead: bool = False) -> dict[str, Any]:
    item = rank(number)
    return {**item, "status": {"unresponsive": unresponsive, "considered_dead": dead}}


def report(ranks: list[dict[str, Any]], lost: list[dict[str, Any]], timeouts: int = 0) -> str:
    communicator = {
        "hash": "0xabc",
        "secondary_hash": "0x1:0x2",
        "size": len(ranks) + len(lost),
        "ranks_count": len(ranks),
        "missing_ranks_count": len(lost),
        "ranks": ranks,
        "missing_ranks": lost,
    }
    ras = {"collection_time_sec": 0.001, "timeouts_count": timeouts}
    return json.dumps({"nccl_version": "2.29.1", "communicators_count": 1, "communicators": [communicator], "ras": ras})


def statements(data: str) -> list[tuple[str, int | None]]:
    return [(line.text, line.rank) for line in read_ras_report(data, "ras.json")]


def test_a_healthy_job_says_nothing() -> None:
    assert statements(report([rank(0), rank(1)], [])) == []


def test_missing_ranks_are_told_by_how_they_are_missing() -> None:
    lost = [missing(1), missing(2, dead=True), missing(3, unresponsive=False)]
    where = "(process 90{0} on node 10.0.0.5, communicator 0xabc of 4 ranks)"
    assert statements(report([rank(0)], lost, timeouts=2)) == [
        (f"NCCL RAS: rank 1 is unresponsive {where.format(1)}", 1),
        (f"NCCL RAS: rank 2 is considered dead {where.format(2)}", 2),
        (f"NCCL RAS: rank 3 is alive and not in the communicator {where.format(3)}", 3),
        ("NCCL RAS: 2 communication timeouts while it asked the job", None),
    ]


def test_ranks_that_launched_fewer_collectives_are_named() -> None:
    assert statements(report([rank(0), rank(1, 5), rank(2)], [])) == [
        ("NCCL RAS: rank 1 launched 5 AllReduce operations, others 7 (communicator 0xabc of 3 ranks)", 1)
    ]
    several = statements(report([rank(0, 4), rank(1, 5), rank(2)], []))
    assert several[0][0].startswith("NCCL RAS: ranks 0 and 1 launched 4 to 5 AllReduce operations, others 7 ")


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({"init_state": 7}, "is still initializing"),
        ({"init_state": 2}, "failed to initialize, ncclSystemError"),
        ({"async_error": 6}, "reported ncclRemoteError"),
        ({"abort_flag": True}, "has aborted"),
    ],
)
def test_what_is_wrong_with_a_rank_that_answers_is_told(status: dict[str, Any], state: str) -> None:
    assert statements(report([rank(0, **status), rank(1)], []))[0][0].startswith(
        f"NCCL RAS: rank 0 {state} (process 900 "
    )


def test_a_rank_of_a_part_of_the_job_is_no_rank_of_the_job() -> None:
    document = json.loads(report([rank(0), rank(1)], []))
    part = json.loads(report([{**rank(0), "nvml_dev": 5, "pid": 77}], [missing(1)]))
    document["communicators"] += part["communicators"]
    assert [item for _, item in statements(json.dumps(document))] == [None]


TEXT = """\
NCCL version 2.28.7 compiled with CUDA 12.9
CUDA runtime version 12090, driver version 12090

Job summary
===========

  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          8            1         16       16

Communicators... (2.05s)
=============

Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         2       7-8        16        16   RUNNING  INCOMPLETE
    1         4         1         4         4        16   RUNNING  MISMATCH

Errors
======

INCOMPLETE
  Missing communicator data from 1 job process
  Process 3487 on node 10.0.0.6 managing GPU 5

DEAD
  1 job process is considered dead (unreachable via the RAS network)
  Process 3488 on node 10.0.0.6 managing GPU 6

#0-0 (cf264af53edbe986) INCOMPLETE
  Missing communicator data from 1 rank
  Rank 13 -- GPU 5 managed by process 3487 on node 10.0.0.6

#0-0 (cf264af53edbe986) ERROR
  Asynchronous error on 1 rank
  Rank 4 reported Remote process error -- GPU 4 managed by process 3401 on node 10.0.0.5

Warnings
========

TIMEOUT
  Encountered 2 communication timeouts while gathering communicator data

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  12 ranks have launched up to operation 6650
  3 ranks have launched up to operation 6649
  Rank 0 -- GPU 0 managed by process 4830 on node 10.0.0.5
  Rank 2 -- GPU 2 managed by process 4832 on node 10.0.0.5
  Rank 3 -- [process information not found]

#1-0 (27a079b828ff1a76) MISMATCH
  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation 12
  Rank 1 has not launched any operations -- GPU 0 managed by process 4830 on node 10.0.0.5

"""


def test_the_text_form_says_the_same() -> None:
    job = "communicator 0xcf264af53edbe986 of 16 ranks"
    assert statements(TEXT) == [
        ("NCCL RAS: process 3487 on node 10.0.0.6 is unresponsive", None),
        ("NCCL RAS: process 3488 on node 10.0.0.6 is considered dead", None),
        (f"NCCL RAS: rank 13 is unresponsive (process 3487 on node 10.0.0.6, {job})", 13),
        (f"NCCL RAS: rank 4 reported Remote process error ({job})", 4),
        (
            "NCCL RAS: ranks 0, 2 and 3 launched 6649 AllReduce operations, others 6650 "
            "(communicator 0x27a079b828ff1a75 of 16 ranks)",
            0,
        ),
        (
            "NCCL RAS: rank 1 launched 0 AllGather operations, others 12 (communicator 0x27a079b828ff1a76 of 4 ranks)",
            None,
        ),
    ]


def test_the_text_of_the_first_release_lists_missing_ranks_in_a_line() -> None:
    old = TEXT.replace("  Rank 13 -- GPU 5 managed by process 3487 on node 10.0.0.6", "  The missing ranks: 13, 14")
    job = "communicator 0xcf264af53edbe986 of 16 ranks"
    assert statements(old)[2:4] == [(f"NCCL RAS: rank {item} is unresponsive ({job})", item) for item in (13, 14)]


def test_a_group_of_ranks_too_large_to_list_is_counted() -> None:
    text = TEXT.replace("  Rank 3 -- [process information not found]\n", "")
    assert any(
        output.startswith("NCCL RAS: 3 ranks launched 6649 AllReduce") and item is None
        for output, item in statements(text)
    )


def test_the_monitor_says_who_died() -> None:
    text = "RAS Monitor Mode - watching for peer changes (Ctrl+C to exit)...\n=====\n"
    event = "[2026-01-02 13:07:07] PEER_DEAD: Process 1524 on node 10.0.0.5 managing GPU 1\n"
    assert statements(text + event) == [("NCCL RAS: process 1524 on node 10.0.0.5 is considered dead", None)]


@pytest.mark.parametrize("data", ["", "hello", "{", "{}", '{"communicators": 3}', '{"a":' * 50_000, "[]"])
def test_what_is_no_report_is_unreadable(data: str) -> None:
    with pytest.raises(Unreadable):
        read_ras_report(data, "x")


NUMBERS = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8)
SENTENCE = re.compile(r"NCCL RAS: ((rank|ranks|process) |\d+ (ranks|communication timeouts) ).+")
NAMES = ["rank", "ranks", "missing_ranks", "status", "size", "collective_counts", "init_state", "AllReduce", "host"]
JSON: st.SearchStrategy[Any] = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    max_leaves=20,
)


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=6), max_size=4), JSON)
def test_any_communicators_are_sentences(communicators: list[dict[str, Any]], ras: Any) -> None:
    lines = read_ras_report(json.dumps({"communicators": communicators, "ras": ras}), "x")
    assert all(SENTENCE.match(line.text) for line in lines)


@given(st.lists(st.sampled_from(TEXT.splitlines()) | st.text(max_size=40), max_size=40))
def test_any_lines_below_a_summary_are_sentences(lines: list[str]) -> None:
    report = read_ras_report("\n".join(["Job summary", *lines]), "x")
    assert all(SENTENCE.match(line.text) for line in report)


@given(st.binary(max_size=200))
def test_any_bytes_are_no_report(data: bytes) -> None:
    with pytest.raises(Unreadable, match=r"^(not a RAS report|not JSON): "):
        read_ras_report(data, "x")
