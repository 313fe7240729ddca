"""Timelines: what each rank did in each attempt, which tracebacks ended it, and whether lines can be ordered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.timeline import Attempt

GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
AGENT = "E1122 01:39:08.250000 {pid} torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: 1) local_rank: {rank} (pid: 71) of binary: /opt/venv/bin/python"


def attempts(*logs: Sequence[str]) -> list[Attempt]:
    parts = ["".join(f"{line}\n" for line in log).encode() for log in logs]
    return read_attempts(read_lines(Excerpt(f"{name}.log", None, None, (Part(1, part),)) for name, part in enumerate(parts)))  # fmt: skip


def attempt(*logs: Sequence[str]) -> Attempt:
    (only,) = attempts(*logs)
    return only


def steps(rank: int, first: int, last: int) -> list[str]:
    return [f"[rank{rank}]: step {step} loss 1.25" for step in range(first, last + 1)]


def raised(rank: int | None, error: str, line: int = 30) -> list[str]:
    prefix = "" if rank is None else f"[rank{rank}]: "
    lines = [
        "Traceback (most recent call last):",
        f'  File "/work/train.py", line {line}, in fit',
        "    f(batch)",
        error,
    ]
    return [f"{prefix}{one}" for one in lines]


def test_each_rank_has_a_timeline() -> None:
    found = attempt([*steps(0, 1, 3), *steps(1, 1, 4), "torchrun says hello"])
    assert {rank: timeline.step for rank, timeline in found.timelines.items()} == {0: 3, 1: 4, None: None}
    assert found.ranks == [0, 1]
    assert not found.has_failed


def test_a_traceback_behind_which_the_rank_goes_on_was_survived() -> None:
    found = attempt([*steps(0, 1, 3), *raised(0, "OSError: retrying"), *steps(0, 4, 6)])
    assert found.failures == {}
    assert not found.has_failed


def test_a_bar_that_is_painted_once_more_is_no_survival() -> None:
    found = attempt([*steps(0, 1, 3), *raised(0, "KeyError: 'x'"), *steps(0, 4, 4)])
    assert found.failures[0].error == "KeyError: 'x'"


def test_of_two_tracebacks_the_last_ended_the_rank() -> None:
    found = attempt([*raised(0, "OSError: retrying"), *steps(0, 1, 1), *raised(0, "KeyError: 'x'")])
    assert found.failures[0].error == "KeyError: 'x'"


def test_of_a_chain_the_first_counts() -> None:
    between = "[rank0]: During handling of the above exception, another exception occurred:"
    found = attempt([*raised(0, "KeyError: 'x'"), between, *raised(0, "RuntimeError: training failed")])
    assert found.failures[0].error == "KeyError: 'x'"


def test_tracebacks_without_a_rank_are_anonymous() -> None:
    found = attempt([*raised(None, GAVE_UP), *raised(None, "KeyError: 'x'")])
    assert [one.error for one in found.anonymous_failures] == [GAVE_UP, "KeyError: 'x'"]
    assert found.failures == {}
    assert found.has_failed


def test_lines_within_a_traceback_are_no_progress() -> None:
    lines = ["[rank0]: Traceback (most recent call last):", '[rank0]:   File "/work/t.py", line 3, in f']
    found = attempt([*steps(0, 1, 2), *lines, "[rank0]:     loss = step(8)", "[rank0]: KeyError: 'x'"])
    assert found.timelines[0].step == 2


def test_the_last_remark_of_a_rank() -> None:
    found = attempt([*steps(0, 1, 2), "[rank0]: the disk is full, leaving", *steps(0, 3, 3)])
    remark = found.timelines[0].remark
    assert remark and remark.message == "the disk is full, leaving"


def test_a_bar_of_a_download_is_no_step() -> None:
    found = attempt([*steps(0, 1, 3), "[rank0]: 12%|#   | 1.2G/9.9G [00:10<01:20, 108MB/s]"])
    assert found.timelines[0].step == 3


def test_the_same_agent_reports_failures_again_only_in_a_new_attempt() -> None:
    agents = [[AGENT.format(pid=77, rank=rank) for rank in (0,)] for _ in range(3)]
    logs = [[*steps(0, 1, 4 + number), *raised(0, "KeyError: 'x'"), *agents[number]] for number in range(3)]
    found = attempts([line for log in logs for line in log])
    assert [one.timelines[0].step for one in found] == [4, 5, 6]


def test_agents_of_two_nodes_report_one_attempt() -> None:
    log = [*steps(0, 1, 4), *raised(0, GAVE_UP), AGENT.format(pid=77, rank=0), AGENT.format(pid=88, rank=1)]
    assert len(attempts(log)) == 1


@pytest.mark.parametrize("words", ["Restarting worker group", "slurmstepd: Job requeued", "INFO restarting training"])
def test_words_of_a_launcher_cut_attempts(words: str) -> None:
    found = attempts([*steps(0, 1, 6), words, *steps(0, 1, 9)])
    assert [one.timelines[0].step for one in found] == [6, 9]


def test_a_launcher_that_says_twice_that_it_starts_again_makes_one_attempt() -> None:
    found = attempts([*steps(0, 1, 6), "Restarting worker group", "Restarting worker group", *steps(0, 1, 9)])
    assert len(found) == 2


def test_one_log_is_ordered_by_its_lines() -> None:
    found = attempt([*steps(0, 1, 2), *steps(1, 1, 2)])
    moments = [found.moment(line) for line in found.lines]
    assert found.is_ordered
    assert moments == sorted(moments)


def test_logs_of_ranks_without_a_clock_have_no_order() -> None:
    assert not attempt(steps(0, 1, 3), steps(1, 1, 3)).is_ordered


def test_logs_of_ranks_with_a_clock_are_ordered_by_it() -> None:
    clocked = [
        [f"2026-11-22 01:00:{2 * step + rank:02},000 - INFO - {line}" for step, line in enumerate(steps(rank, 1, 3))]
        for rank in (0, 1)
    ]
    found = attempt(*clocked)
    assert found.is_ordered
    moments = {(line.rank, line.number): found.moment(line) for line in found.lines}
    assert sorted(moments, key=lambda key: moments[key]) == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3), (1, 3)]


def test_ranks_that_print_nothing_are_known_from_the_launcher() -> None:
    found = attempt(["dist_world_size=4", *steps(0, 1, 2)])
    assert found.ranks == [0, 1, 2, 3]


def test_a_rank_that_the_launcher_had_to_end_was_alive() -> None:
    summary = ["rank      : 1 (local_rank: 1)", "exitcode  : -15 (pid: 7)"]
    found = attempt([*steps(0, 1, 2), *summary])
    assert (found.was_alive(1), found.was_alive(0)) == (True, False)
    assert found.ending(None) is None


def test_a_watchdog_that_gave_up_belongs_to_its_rank() -> None:
    watchdog = (
        "[rank1]:[E1122 01:39:08.2 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout"
    )
    found = attempt([*raised(1, "OSError: retrying"), watchdog])
    gave_up = found.timelines[1].gave_up
    assert gave_up and gave_up.number == 5
    assert found.failures == {}, "it was alive to wait"


def test_nothing_gives_one_empty_attempt() -> None:
    assert [len(one.lines) for one in attempts([])] == [0]


def test_folders_of_attempts_are_attempts() -> None:
    """As torchrun's --log-dir has them; the log of the launcher is cut as ever."""

    def rank(number: int, error: str) -> list[str]:
        return [*(f"step {step}" for step in range(1, 7)), *raised(None, f"{error}: 'x'")]

    logs = {
        "run/attempt_1/0/stderr.log": rank(0, "ValueError"),
        "run/attempt_0/0/stderr.log": rank(0, "KeyError"),
        "run/attempt_0/1/stderr.log": rank(1, "OSError"),
    }
    excerpts = [
        Excerpt(name, int(name.split("/")[2]), None, (Part(1, "".join(f"{line}\n" for line in lines).encode()),))
        for name, lines in logs.items()
    ]
    first, second = read_attempts(read_lines(excerpts))
    assert [first.failures[rank].error for rank in (0, 1)] == ["KeyError: 'x'", "OSError: 'x'"]
    assert (list(second.failures), second.failures[0].error) == ([0], "ValueError: 'x'")


def test_each_fall_of_the_counters_behind_a_failure_begins_an_attempt() -> None:
    """torch 2.2 names no process in the line of its agent."""
    failed = "[2026-01-01 00:00:00,000] torch.distributed.elastic.multiprocessing.api: [ERROR] failed (exitcode: 1) local_rank: 0"
    run = [f"[rank0]: step {step}" for step in range(1, 9)]
    found = attempts([*run, failed, *run, failed, *run])
    assert [attempt.timelines[0].step for attempt in found] == [8, 8, 8]
    assert len(attempts([*run, failed, failed, *run])) == 2, "one start for several ranks that failed"


@pytest.mark.parametrize(
    ("last", "is_complete"),
    [
        ("training finished", True),
        ("[20/20] files", True),
        ("Received 2 death signal, shutting down workers", False),
        ("[20/20] files\nRunning tokenizer: [1/900]", False),
    ],
)
def test_whether_a_job_came_to_its_end(last: str, is_complete: bool) -> None:
    job = attempt([*(f"step {step}" for step in range(1, 9)), *last.split("\n")])
    assert (job.completion is not None) is is_complete
