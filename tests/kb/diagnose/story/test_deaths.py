"""Ranks that ended without a traceback: by a signal or an exit code; and who only seems to have died by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kb.diagnose.story.attempts import read_attempts
from kb.diagnose.story.deaths import describe_endings, exited_ranks, first_ending, killed_ranks
from kb.diagnose.story.excerpt import Excerpt, Part
from kb.diagnose.story.lines import read_lines
from kb.diagnose.story.timeline import Attempt

TORCH = "/opt/venv/lib/python3.11/site-packages/torch"
GAVE_UP = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for send operation"
LOST = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4711"
WATCHDOG = "[rank{0}]:[E1122 01:39:08.2 ProcessGroupNCCL.cpp:632] [Rank {0}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"


def attempt(*blocks: Sequence[str]) -> Attempt:
    data = "".join(f"{line}\n" for block in blocks for line in block).encode()
    (only,) = read_attempts(read_lines([Excerpt("job.log", None, None, (Part(1, data),))]))
    return only


def steps(rank: int) -> list[str]:
    return [f"[rank{rank}]: step {step} loss 1.25" for step in range(1, 9)]


def raises(rank: int | None, error: str) -> list[str]:
    lines = ["Traceback (most recent call last):", '  File "/work/t.py", line 44, in save', "    f()", error]
    return [line if rank is None else f"[rank{rank}]: {line}" for line in lines]


def ended(rank: int, code: int, *, is_first: bool = False) -> list[str]:
    first = ["Root Cause (first observed failure):"] if is_first else []
    return [*first, f"rank      : {rank} (local_rank: {rank})", f"exitcode  : {code} (pid: 71{rank})"]


@pytest.mark.parametrize(
    ("code", "name"), [(-9, "SIGKILL"), (-11, "SIGSEGV"), (-7, "SIGBUS"), (-4, "SIGILL"), (-8, "SIGFPE")]
)
def test_a_signal_that_no_launcher_sends_as_a_request_killed_the_rank(code: int, name: str) -> None:
    (fact,) = killed_ranks(attempt(steps(0), steps(2), ended(2, code), ended(0, -15)))
    assert (fact.kind, fact.ranks) == ("killed", (2,))
    assert fact.text == f"kb: rank 2 ended by {name} without a traceback, last progress: train step 8"
    assert fact.lines[-1].text.startswith("exitcode")


@pytest.mark.parametrize("code", [-15, -2, -1, 0, 1])
def test_requests_and_exit_codes_kill_nobody(code: int) -> None:
    assert not list(killed_ranks(attempt(steps(2), ended(2, code))))


def test_the_kernel_is_cited_before_the_exit_code() -> None:
    kernel = ["[Sun Nov 22 01:39:08 2026] Out of memory: Killed process 712 (python)"]
    (fact,) = killed_ranks(attempt(steps(2), kernel, ended(2, -9)))
    assert fact.text.endswith(", the kernel reports an oom kill")
    assert [line.number for line in fact.lines] == [9, 11]


@pytest.mark.parametrize("is_before", [True, False])
def test_a_rank_killed_after_the_others_gave_up_is_not_the_culprit(is_before: bool) -> None:
    killed = ["srun: error: node-1: task 2: Killed"]
    waiting = [line for rank in (0, 1, 3) for line in raises(rank, GAVE_UP)]
    found = list(killed_ranks(attempt(steps(2), *((killed, waiting) if is_before else (waiting, killed)))))
    assert [fact.ranks for fact in found] == ([(2,)] if is_before else [])


def test_a_rank_killed_before_the_others_lost_it_is_the_culprit() -> None:
    lost = [line for rank in (0, 1, 3) for line in raises(rank, LOST)]
    (fact,) = killed_ranks(attempt(steps(2), lost, ["srun: error: node-1: task 2: Killed"]))
    assert fact.ranks == (2,)


def test_sigabrt_of_a_watchdog_is_not_killed() -> None:
    assert not list(killed_ranks(attempt(steps(1), [WATCHDOG.format(1)], ended(1, -6))))
    assert not list(killed_ranks(attempt(steps(0), steps(1), [WATCHDOG.format(0)], ended(0, -6), ended(1, -6))))


def test_sigabrt_without_a_watchdog_and_a_traceback_is() -> None:
    (fact,) = killed_ranks(attempt(steps(1), ended(1, -6)))
    assert (fact.ranks, "SIGABRT" in fact.text) == ((1,), True)


def test_an_exit_code_without_a_traceback_and_the_last_message() -> None:
    (fact,) = exited_ranks(attempt(steps(2), ["[rank2]: the disk is full, leaving"], ended(2, 3)))
    assert (fact.kind, fact.ranks) == ("exit", (2,))
    assert fact.text == (
        'kb: rank 2 ended with exit code 3 and without a traceback, its last message: "the disk is full, leaving"'
    )


def test_a_failure_line_that_names_the_rank_is_its_message() -> None:
    (fact,) = exited_ranks(attempt(steps(2), ["ERROR: no space left on rank 2"], ended(2, 3)))
    assert 'its last message: "no space left on rank 2"' in fact.text


@pytest.mark.parametrize("code", [0, -15])
def test_who_ended_well_or_was_asked_to_did_not_leave(code: int) -> None:
    assert not list(exited_ranks(attempt(steps(2), ended(2, code))))


def test_exit_code_1_counts_where_it_was_first_and_no_traceback_may_be_its_own() -> None:
    assert not list(exited_ranks(attempt(steps(2), ended(2, 1))))
    assert [fact.ranks for fact in exited_ranks(attempt(steps(2), ended(2, 1, is_first=True)))] == [(2,)]
    assert not list(exited_ranks(attempt(steps(2), raises(None, "KeyError: 'x'"), ended(2, 1, is_first=True))))
    assert not list(exited_ranks(attempt(steps(2), raises(2, "KeyError: 'x'"), ended(2, 1, is_first=True))))


def test_whom_the_launcher_saw_first_is_context_alone() -> None:
    (fact,) = first_ending(attempt(steps(1), ended(3, -15), ended(1, 1, is_first=True)))
    assert (fact.text, fact.is_context) == ("kb: the launcher saw rank 1 end first (exit code 1)", True)
    assert not list(first_ending(attempt(steps(1), ended(3, -15))))


@pytest.mark.parametrize(
    ("blocks", "words"),
    [
        ([raises(2, "KeyError: 'x'"), raises(0, LOST)], "KeyError on rank 2"),
        ([raises(0, LOST), ended(2, -9)], "SIGKILL on rank 2"),
        ([raises(0, LOST), raises(1, GAVE_UP)], "ranks that waited or lost others"),
        ([ended(2, 3)], "exit code 3 on rank 2"),
        ([steps(0)], "no failure"),
    ],
)
def test_the_end_of_an_attempt_in_a_few_words(blocks: list[list[str]], words: str) -> None:
    assert describe_endings(attempt(steps(0), *blocks)) == words
