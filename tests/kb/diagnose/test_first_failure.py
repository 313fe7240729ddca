"""Which rank failed first, and which never came: what is told, and what is not claimed."""

from __future__ import annotations

from typing import Any

from kb.diagnose.evidence import Exit, Failure, Line, SignatureMatch, Timeout
from kb.diagnose.first_failure import RankSummary, earliest, summarize_ranks
from kb.diagnose.ranking import Candidate
from kb.diagnose.scan.result import Scan

DAY = 1_795_230_000.0  # seconds since the epoch
OOM = "torch.OutOfMemoryError: CUDA out of memory."


def line(text: str, number: int = 1, rank: int | None = None, time: float | None = None, source: str = "a.log") -> Line:
    return Line(source, number, text, rank, time)


def candidate(role: str, *lines: Line) -> Candidate:
    ranks = tuple(sorted({item.rank for item in lines if item.rank is not None}))
    return Candidate("entry", role, 1.0, 0.0, (SignatureMatch("entry", role, "p", "m", len(lines), ranks, lines),))


def failure(line: Line, *ranks: int) -> Failure:
    own = () if line.rank is None else (line.rank,)
    return Failure(line, 1, ranks or own)


def summarize(*candidates: Candidate, **scan: Any) -> RankSummary:
    return summarize_ranks(Scan(sources=1, **scan), candidates)


def test_of_causes_the_earliest_by_time_is_first() -> None:
    lines = line(OOM, 1, 0, DAY + 9, "rank0.log"), line(OOM, 1, 3, DAY + 2, "rank3.log")
    result = summarize_ranks(Scan(sources=2), [candidate("root", *lines)])
    assert (result.failed_first, result.first_failure) == (3, lines[1])


def test_a_cause_counts_more_than_an_earlier_failure_that_nobody_knows() -> None:
    result = summarize(
        candidate("root", line(OOM, 40, 3)), failures=(failure(line("ERROR retrying the download", 2, 1)),)
    )
    assert result.failed_first == 3


def test_what_a_waiting_rank_prints_is_no_first_failure() -> None:
    waited = line("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE", 5, 1)
    result = summarize(
        candidate("cascade", waited), failures=(failure(waited), failure(line("Connection closed by peer", 6, 2)))
    )
    assert (result.first_failure, result.failed_first) == (None, None)


def test_the_exception_of_a_rank_that_no_entry_knows_is_the_first_failure() -> None:
    traceback, error = line("Traceback (most recent call last):", 7, 5), line("ValueError: too many values", 9, 5)
    earlier = line("Failed to fetch the manifest, using the cached one", 2, 0)
    result = summarize(failures=(failure(earlier), failure(traceback), failure(error)))
    assert (result.first_failure, result.failed_first) == (error, 5)


def test_what_the_launcher_concluded_is_not_the_failure_itself() -> None:
    summary = line("traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html", 30)
    error = line("ValueError: too many values", 9, 5)
    assert summarize(candidate("root", summary), failures=(failure(error),)).first_failure == error


def test_without_any_other_word_the_launchers_is_taken() -> None:
    exits = Exit(2, -15, line("exitcode  : -15 (pid: 7)", 20)), Exit(5, 1, line("exitcode  : 1 (pid: 8)", 28))
    result = summarize(exits=(*exits, Exit(0, -15, line("exitcode  : -15", 31))))
    assert (result.failed_first, result.first_failure) == (5, exits[1].line)


def test_a_rank_that_waited_is_not_blamed_because_torchrun_saw_it_die_first() -> None:
    timeout = Timeout(0, "0", 7, "ALLREDUCE", 4, 4, line("Watchdog caught", 5, 0))
    result = summarize(exits=(Exit(0, -6, line("exitcode  : -6 (pid: 7)", 20)),), timeouts=(timeout,))
    assert (result.failed_first, result.first_failure) == (None, None)


def test_the_kernel_names_no_rank_and_the_launcher_does() -> None:
    kernel = line("Memory cgroup out of memory: Killed process 71302 (python)", 6, None, 1204455.9, "dmesg")
    result = summarize(candidate("root", kernel), exits=(Exit(2, -9, line("exitcode  : -9 (pid: 71302)", 20)),))
    assert (result.failed_first, result.first_failure) == (2, kernel)


def test_of_files_without_times_nobody_can_say_who_was_first() -> None:
    item, other = (line("ShardError: odd", 4, rank, None, f"rank{rank}.log") for rank in (0, 1))
    result = summarize_ranks(Scan(sources=2, failures=(failure(item, 0, 1),)), [])
    assert (result.first_failure, result.failed_first) == (item, None)
    assert summarize_ranks(Scan(sources=2, failures=(failure(item), failure(other))), []).failed_first is None


def test_one_log_of_all_ranks_has_an_order() -> None:
    result = summarize(candidate("root", line(OOM, 90, 0), line(OOM, 40, 3)))
    assert (result.failed_first, result.first_failure) == (3, line(OOM, 40, 3))


def test_a_sentence_of_kb_is_not_a_rank_that_failed() -> None:
    derived = line("kb: ranks timed out in different collectives at SeqNum=7: rank 2 in ALLGATHER", 5, 2)
    dumped = line("rank 0 came to collective 1 (barrier) 1846.2 s after rank 1, which waits for 1800.0 s", 0, 0)
    assert summarize(candidate("root", derived), candidate("root", dumped)).first_failure is None


def test_an_error_file_has_no_line_numbers_and_counts_all_the_same() -> None:
    raised = line("RuntimeError: Expected to mark a variable ready only once.", 0, 1, DAY, "1/error.json")
    assert summarize(candidate("root", raised)).failed_first == 1


def test_all_ranks_that_a_sentence_names_are_absent() -> None:
    observations = (
        line("kb: rank 2, 5 reported no timeout while 6 others waited in SeqNum=7 ALLREDUCE", 5, 2),
        line("ranks 8-10 and 12 never issued collective 3 (all_reduce [4] Float), which rank 0 is in", 0, 8),
        line("rank 1 is in train.py:28 main", 0, 1),
    )
    assert summarize(observations=observations).absent == (2, 5, 8, 9, 10, 12)


def test_nothing_found_is_nobody() -> None:
    result = summarize(ranks=(0, 1))
    assert result.to_json() == {"failed_first": None, "first_failure": None, "absent": (), "known": (0, 1)}


def test_seconds_since_boot_do_not_compare_with_dates() -> None:
    dated, booted = line("a", 9, 0, DAY, "job.log"), line("b", 1, None, 1204455.9, "dmesg")
    assert earliest([dated, booted]) == dated
    assert earliest([booted, line("c", 2, None, 1204450.0, "dmesg")]) == line("c", 2, None, 1204450.0, "dmesg")
    assert earliest([]) is None
