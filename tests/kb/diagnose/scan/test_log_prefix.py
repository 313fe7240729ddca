"""Rank, time and text of a line, whoever wrote its prefixes."""

from __future__ import annotations

import re
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kb.diagnose.inputs import rank_from_path as rank_from_path_module
from kb.diagnose.inputs.rank_from_path import rank_from_path
from kb.diagnose.scan import log_prefix, nccl_processes, timestamps
from kb.diagnose.scan.log_prefix import LONGEST_LINE, LogLine, parse_prefix, strip_escapes
from kb.diagnose.scan.nccl_processes import NcclProcesses
from kb.patterns.redos import backtracking_risk


def at(*date: int) -> float:
    return datetime(*date, tzinfo=UTC).timestamp()  # type: ignore[misc, arg-type]  # year, month, day, ...


WRITTEN = at(2026, 11, 21, 4)
NOON = at(2026, 11, 21, 3, 4, 5)


@pytest.mark.parametrize(
    ("line", "rank", "text"),
    [
        ("[rank3]: Traceback (most recent call last):", 3, "Traceback (most recent call last):"),
        ("[rank3]:   File 'x', line 1", 3, "  File 'x', line 1"),
        ("[default3]:boom", 3, "boom"),
        ("[default3]:[rank11]: boom", 11, "boom"),
        ("[trainer0]:boom", 0, "boom"),
        ("3: boom", 3, "boom"),
        ("  3:   File 'x'", 3, "  File 'x'"),
        ("12: [rank12]: boom", 12, "boom"),
        ("[1,3]<stderr>:boom", 3, "boom"),
        ("[prterun-host-7@1,3]<stdout>: boom", 3, "boom"),
        ("(RayTrainWorker pid=1, ip=10.0.0.1) [rank3]: boom", 3, "boom"),
        ("\x1b[36m(RayTrainWorker pid=1)\x1b[0m boom", None, "boom"),
        ("(VllmWorkerProcess pid=12) boom", None, "boom"),
        ("(VllmWorker rank=3 pid=12) boom", 3, "boom"),
        ("[pod/job-worker-3/pytorch] boom", None, "boom"),
        ("[pod/job-worker-3/pytorch] [rank25]: boom", 25, "boom"),
        ("worker-3  | boom", None, "boom"),
        ("node-1: [rank3]: boom", 3, "boom"),
        ("[2026-11-21 03:04:05,123] [INFO] [logging.py:96:log_dist] [Rank 3] step", 3, None),
        ("[2026-11-21 03:04:05,123] [INFO] [train.py:9] [PID:77] [RANK:5] step", 5, None),
        ("[E ProcessGroupNCCL.cpp:828] [Rank 5] Watchdog caught collective operation timeout", 5, None),
        ("[rank12]:[E1121 03:04:05.1 ProcessGroupNCCL.cpp:6] [PG ID 2 PG GUID 5(tp) Rank 4] failed", 12, None),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 4] failed", 4, None),
        ("[PG ID 2 PG GUID 5(tp) Rank 4] failed", None, None),
        ("[default1]:[E ProcessGroupNCCL.cpp:828] [Rank 9] failed", 9, None),
        ("Initializing distributed: GLOBAL_RANK: 3, MEMBER: 4/8", 3, None),
        ("[rank: 3] Child process with PID 77 terminated", 3, None),
        ("2026-11-21 03:04:05,123: rank5[12][MainThread]: DEBUG: step", 5, None),
        ("RuntimeError: rank 3 has no such key", None, None),
        ("12:30 is no rank", None, None),
        ("[node3]: boom", None, None),
        ("[epoch3]: loss 1.2", None, None),
        ("", None, ""),
    ],
)
def test_the_rank_is_the_texts_own_before_the_launchers(line: str, rank: int | None, text: str | None) -> None:
    prefix = parse_prefix(line, WRITTEN)
    assert prefix.rank == rank
    assert text is None or prefix.text == text


def test_the_rank_of_the_file_counts_where_the_line_says_none() -> None:
    assert parse_prefix("boom", rank=7).rank == 7
    assert parse_prefix("[default3]:boom", rank=7).rank == 3


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("[rank3]:[E1121 03:04:05.500 ProcessGroupNCCL.cpp:616] [Rank 3] x", NOON + 0.5),
        ("E1121 03:04:05.500000 1234 torch/distributed/elastic/api.py:1] failed", NOON + 0.5),
        ("[rank0]:W1121 03:04:05.500000 2026 torch/_dynamo/x.py:1] [0/8] x", NOON + 0.5),
        ("2026-11-21 03:04:05,500 - x", NOON + 0.5),
        ("2026-11-21 03:04:05.500 | INFO | x", NOON + 0.5),
        ("[2026-11-21 03:04:05,500] [INFO] x", NOON + 0.5),
        ("[2026-11-21 03:04:05] node-1:10:11 [0] NCCL WARN x", NOON),
        ("2026-11-21T03:04:05.500000000Z stderr F [rank3]: x", NOON + 0.5),
        ("2026-11-21T11:04:05+08:00 x", NOON),
        ("2026-11-20 22:04:05 -0500 x", NOON),
        ("[INFO|trainer.py:12] 2026-11-21 03:04:05,500 >> x", NOON + 0.5),
        ("[NeMo W 2026-11-21 03:04:05 nemo_logging:349] x", NOON),
        ("(VllmWorkerProcess pid=12) ERROR 11-21 03:04:05 [x.py:1] x", NOON),
        ("11/21/2026 03:04:05 - INFO - __main__ - x", NOON),
        ("[11/21/26 03:04:05] INFO x", NOON),
        ("[Sat Nov 21 03:04:05 2026] Out of memory: Killed process 77 (python)", NOON),
        ("Nov 21 03:04:05 gpu-1 kernel: NVRM: Xid (PCI:0000:1b:00): 79", NOON),
        ("slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T03:04:05 DUE TO TIME LIMIT ***", NOON),
        ("1795230245.5 x", 1795230245.5),
        ("[12345.678901] NVRM: Xid", 12345.678901),
        ("[   45.678901] NVRM: Xid", 45.678901),
        ("Dec 31 23:59:00 gpu-1 kernel: x", at(2025, 12, 31, 23, 59)),
        ("Feb 29 03:04:05 gpu-1 kernel: x", None),  # neither 2026 nor 2025 has one
        ("2026-13-41 03:04:05 x", None),
        ("elapsed 03:04:05 x", None),
        (" 10%|# | 1/9 [00:00:10<00:01:20, 1.0s/it]", None),
        ("nothing", None),
    ],
)
def test_times_are_seconds_since_the_epoch_whatever_their_form(line: str, seconds: float | None) -> None:
    result = parse_prefix(line, WRITTEN).time
    assert result == (None if seconds is None else pytest.approx(seconds, abs=1e-4))


def test_a_date_without_a_year_may_be_a_zone_ahead_of_the_file_but_not_a_year() -> None:
    new_year = at(2026, 1, 1, 0, 30)
    assert parse_prefix("Jan  1 08:30:00 gpu-1 kernel: x", new_year).time == at(2026, 1, 1, 8, 30)
    assert parse_prefix("Dec 31 23:30:00 gpu-1 kernel: x", new_year).time == at(2025, 12, 31, 23, 30)
    assert parse_prefix("Dec 31 23:30:00 gpu-1 kernel: x", float("inf")).time is not None


def test_leading_times_and_the_journals_host_are_not_part_of_the_text() -> None:
    assert parse_prefix("Nov 21 03:04:05 gpu-1 kernel: [ 45.678901] NVRM: Xid", WRITTEN).text == "NVRM: Xid"
    assert parse_prefix("2026-11-21T03:04:05.5Z stderr F [rank3]: boom") == LogLine(3, NOON + 0.5, "boom")
    assert parse_prefix("[2026-11-21 03:04:05] [default3]:boom").text == "boom"


def test_colours_titles_and_cursor_movements_go() -> None:
    assert strip_escapes(b"\x1b[1;31mred\x1b[0m \x1b]0;title\x07text\x1b[K\xff") == b"red text\xff"
    assert parse_prefix("\x1b[31m[rank3]\x1b[0m: \x1b[1mboom\x1b[m") == LogLine(3, None, "boom")


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("logs/abc_1x/attempt_0/3/stderr.log", 3),
        ("logs/abc_1x/attempt_1/12/error.json", 12),
        ("logs/abc_1x/attempt_0/3/stdout.log.gz", 3),
        ("attempt_0/filtered_stderr.log", None),
        ("rank_3.log", 3),
        ("out/rank3.out", 3),
        ("out/rank-03/stderr.log", 3),
        ("train_rank3.log.gz", 3),
        ("nccl_trace_rank_3", 3),
        ("comm_lib_trace_rank_31", 31),
        ("global_rank_3_of_8.log", 3),
        ("mp_rank_03/x.log", None),
        ("dp_rank_0.log", None),
        ("local_rank_3.log", None),
        ("node_rank_3.log", None),
        ("lora_rank_64.log", None),
        ("frank3.log", None),
        ("log.3", None),
        ("slurm-123_3.out", None),
        ("job.3.out", None),
        ("worker-3.log", None),
        ("-", None),
    ],
)
def test_a_file_has_a_rank_only_where_its_name_is_certain(path: str, rank: int | None) -> None:
    assert rank_from_path(path) == rank


def init(host: str, pid: int, rank: int, size: int, done: str = "COMPLETE") -> str:
    head = f"{host}:{pid}:{pid + 1} [0] NCCL INFO ncclCommInitRankConfig comm 0x55 rank {rank} nranks {size}"
    return f"{head} cudaDev 0 nvmlDev 0 busId 1b000 commId 0x9f - Init {done}"


def test_lines_of_a_process_get_the_rank_it_had_in_the_largest_communicator() -> None:
    known = NcclProcesses()
    assert known.rank("n1:10:12 [0] NCCL WARN early") is None
    assert known.rank(init("n1", 10, 1, 2, "START")) == 1
    assert known.rank(init("n1", 10, 3, 8)) == 3
    assert known.rank(init("n2", 10, 5, 8)) == 5
    assert known.rank(init("n1", 10, 0, 2)) == 3
    assert known.rank("n1:10:99 [0] transport/net_ib.cc:9 NCCL WARN NET/IB : Got completion with error") == 3
    assert known.rank("n2:10:99 [0] NCCL INFO x") == 5
    assert known.rank("n3:10:99 [0] NCCL INFO x") is None
    assert known.rank("Traceback (most recent call last):") is None


def test_a_process_with_two_ranks_has_none() -> None:
    known = NcclProcesses()
    known.rank(init("n1", 10, 0, 8))
    known.rank(init("n1", 10, 1, 8))
    assert known.rank("n1:10:12 [1] NCCL INFO x") is None


ODD = st.text(alphabet="[]()<>{}0123456789:-/.,|@ \x1brankRANKdefaultpidpodPGE=TZ\u0663\u00b2\n\r\ufeff", max_size=120)


@given(ODD, st.sampled_from(["", "[rank", "2026-11-21 03:04:05", "[1,3]<", "(A pid=", "E0230 03:04:05.", "[PG ID 0 "]))
def test_no_line_makes_it_raise_and_the_text_is_an_end_of_it(line: str, front: str) -> None:
    prefix = parse_prefix(front + line, WRITTEN)
    assert strip_escapes((front + line).encode()).decode().endswith(prefix.text)
    rank_from_path(line)
    NcclProcesses().rank(line)


@pytest.mark.parametrize(
    "bait", ["[PG 0 ", "a-1", "a-", "1", " ", "[", "(a ", "\x1b[", "\x1b]", "[rank1]:", "00:", "n:1:"]
)
def test_a_line_of_bait_is_cut_and_ends(bait: str) -> None:
    prefix = parse_prefix(bait * (10_000_000 // len(bait)), WRITTEN)
    assert len(prefix.text) <= LONGEST_LINE


@pytest.mark.parametrize(
    "module", [log_prefix, timestamps, nccl_processes, rank_from_path_module], ids=lambda module: module.__name__
)
def test_no_pattern_may_take_for_ever(module: object) -> None:
    for name, pattern in vars(module).items():
        if isinstance(pattern, re.Pattern):
            text = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
            assert not backtracking_risk(f"(?x){text}" if pattern.flags & re.VERBOSE else text), name
