"""How ranks ended, in the words of launchers, schedulers, the kernel and the C++ runtime."""

from __future__ import annotations

import pytest

from kb.diagnose.story.endings import Endings, has_given_up, is_restart
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines

AGENT = "E1122 01:39:08.250000 {pid} torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: {code}) local_rank: {rank} (pid: 71{rank}) of binary: /opt/venv/bin/python"
SUMMARY = """\
train.py FAILED
Failures:
[1]:
  time      : 2026-11-22_01:39:08
  host      : node-1
  rank      : 3 (local_rank: 3)
  exitcode  : -15 (pid: 714)
  error_file: <N/A>
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_01:39:08
  host      : node-1
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 713)
  traceback : Signal 9 (SIGKILL) received by PID 713
"""


def endings(log: str) -> Endings:
    result = Endings()
    for line in read_lines([Excerpt("job.log", None, None, (Part(1, log.encode()),))]):
        result.read(line)
    result.close()
    return result


def codes(log: str) -> dict[int, int]:
    return {rank: ending.code for rank, ending in endings(log).by_rank.items()}


def test_the_summary_of_torchrun_names_ranks_codes_and_the_first() -> None:
    result = endings(SUMMARY).by_rank
    assert {rank: (one.code, one.is_first, one.text) for rank, one in result.items()} == {
        3: (-15, False, "SIGTERM"),
        2: (-9, True, "SIGKILL"),
    }
    assert result[2].line.number == 14


def test_the_agent_counts_only_without_a_summary() -> None:
    agent = AGENT.format(pid=77, code=1, rank=0) + "\n"
    assert codes(agent) == {0: 1}
    assert codes(agent + SUMMARY) == {3: -15, 2: -9}


def test_of_several_lines_of_the_agent_the_first_counts_for_a_rank() -> None:
    assert codes(AGENT.format(pid=77, code=1, rank=0) + "\n" + AGENT.format(pid=77, code=-6, rank=0)) == {0: 1}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("Killed", -9),
        ("Out Of Memory", -9),
        ("Segmentation fault", -11),
        ("Aborted (core dumped)", -6),
        ("Bus error", -7),
        ("Terminated", -15),
        ("Exited with exit code 3", 3),
    ],
)
def test_words_of_srun(words: str, code: int) -> None:
    assert codes(f"srun: error: node-1: task 2: {words}\n") == {2: code}


def test_srun_names_several_tasks_by_a_range() -> None:
    result = codes("srun: error: node-1: tasks 1-3: Exited with exit code 1\n")
    assert result.get(1) == 1


@pytest.mark.parametrize(("tasks", "ranks"), [("1-3", {1, 2, 3}), ("0,2", {0, 2}), ("0,2-3", {0, 2, 3})])
def test_all_tasks_of_a_range_or_list_ended(tasks: str, ranks: set[int]) -> None:
    assert set(codes(f"srun: error: node-1: tasks {tasks}: Killed\n")) == ranks


@pytest.mark.parametrize(
    ("line", "ended"),
    [
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with signal SIGKILL", {1: -9}),
        ("torch.multiprocessing.spawn.ProcessExitedException: process 1 terminated with exit code 3", {1: 3}),
        ("Process 2 terminated with signal SIGSEGV", {2: -11}),
    ],
)
def test_words_of_spawn(line: str, ended: dict[int, int]) -> None:
    assert codes(line) == ended


@pytest.mark.parametrize(
    "line",
    [
        "[Sun Nov 22 01:39:08 2026] Out of memory: Killed process 713 (python) total-vm:9000kB",
        "[  812.102] oom-kill:constraint=CONSTRAINT_MEMCG,task=python,pid=713",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=77.0. Some of the step tasks have been OOM Killed.",
    ],
)
def test_the_kernel_and_slurm_report_an_oom_kill(line: str) -> None:
    assert len(endings(line).oom_kills) == 1


def test_out_of_memory_of_a_gpu_is_no_oom_kill() -> None:
    assert not endings("[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB\n").oom_kills


def test_an_exception_in_cpp_is_an_abort_that_waited() -> None:
    log = "terminate called after throwing an instance of 'gloo::EnforceNotMet'\n  what():  data size doesn't match\n"
    result = endings(f"[rank2]: {log.splitlines()[0]}\n[rank2]: {log.splitlines()[1]}\n")
    assert [line.rank for line in result.aborts] == [2]
    assert result.has_aborted_waiting


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[rank1]:[E1122 01:39 ProcessGroupNCCL.cpp:632] [Rank 1] Watchdog caught collective operation timeout", True),
        ("[Rank 0] Aborting process on rank 0", True),
        ("[rank0]:[F1122] [PG ID 0 Rank 0] ProcessGroupNCCL's HeartbeatMonitor ran into a timeout", True),
        ("the request timed out after 30 s, once more", False),
        ("step 8", False),
    ],
)
def test_a_watchdog_that_gave_up(line: str, expected: bool) -> None:
    assert has_given_up(line) is expected
    assert endings(line).has_aborted_waiting is expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[default] worker group FAILED. 2/3 attempts left; will restart worker group", True),
        ("Restarting worker group", True),
        ("slurmstepd: Job requeued", True),
        ("INFO restarting from checkpoint 40", True),
        ("download, attempt 2 of 3", False),
        ("restarting the data loader", False),
        ("step 2", False),
    ],
)
def test_words_of_a_restart(line: str, expected: bool) -> None:
    assert is_restart(line) is expected


def test_deepspeed_prints_how_many_ranks_one_node_starts() -> None:
    line = "[2026-11-22 01:38:57,154] [INFO] [launch.py:164:main] dist_world_size=4"
    assert endings(line).started == 4
    assert endings("dist_world_size=999999").started <= 1024


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("ERROR: loss diverged on rank 2", [2]),
        ("Rank 5: fatal error in the loader", [5]),
        ("INFO: rank 2 is well", []),
        ("srun: error: rank 2", []),
    ],
)
def test_the_last_failure_line_that_names_a_rank(line: str, ranks: list[int]) -> None:
    assert list(endings(line).errors) == ranks
