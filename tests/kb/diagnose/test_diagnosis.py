"""From a scan to an answer, with the entries that ship: what is said, how sure, and what is held against it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from kb.diagnose.diagnosis import CONFIDENCE, Diagnosis
from kb.diagnose.next_step import CERTAIN, LIKELY

Answer = Callable[..., Diagnosis]

SHM = "[rank1]: NCCL WARN Error while creating shared memory segment /dev/shm/nccl-00ab (size 9637888)"
FULL = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has a total capacity of 79 GiB"
OOM = f'[rank3]:   File "/w/model.py", line 88, in forward\n[rank3]:     h = self.up(x)\n{FULL}'
WAITED = (
    "[rank{0}]:[E1121 03:14:05.118 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=503316, NumelOut=503316, Timeout(ms)=600000) ran for 600013 ms"
)
RAISED = (
    '{0}Traceback (most recent call last):\n{0}  File "/w/data.py", line 40, in __iter__\n'
    "{0}webdataset.ShardError: s3://corpus/shard-00118.tar: 403 SlowDown\n"
)
KILLED = """\
[1204455.902233] Memory cgroup out of memory: Killed process 71302 (python) total-vm:289331200kB, anon-rss:128331200kB, \
file-rss:91200kB, shmem-rss:8kB, UID:0 pgtables:265012kB oom_score_adj:936
"""
ENDED = """\
E1121 03:14:10.001 712 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: -9) local_rank: 2
  rank      : 2 (local_rank: 2)
  exitcode  : -9 (pid: 71302)
"""


def test_a_cause_in_words_is_certain_and_cited(answer: Answer) -> None:
    result = answer(f"step 1\n{SHM}\n")
    first = result.findings[0]
    assert (first.id, first.role) == ("shm-too-small", "root")
    assert CERTAIN <= first.confidence <= CONFIDENCE["root"][0]
    assert [(line.source, line.number, line.rank) for line in first.evidence] == [("0.log", 2, 1)]
    assert not result.unexplained


def test_confidence_falls_with_the_place(answer: Answer) -> None:
    result = answer(f"{OOM}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2)))
    confidences = [finding.confidence for finding in result.findings]
    assert confidences == sorted(confidences, reverse=True)
    assert len(confidences) > 1


def test_what_follows_from_a_seen_cause_says_so(answer: Answer) -> None:
    result = answer(f"{OOM}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2)))
    assert result.findings[0].role == "root"
    masked = next(finding for finding in result.findings if finding.id == "oom-masked-as-nccl-timeout")
    assert masked.role == "cascade"
    assert result.findings[0].id in masked.caused_by
    assert any(item.startswith("it follows from") for item in masked.against)
    assert (result.ranks.failed_first, result.ranks.absent) == (3, (3,))


def test_what_says_no_reason_beside_what_followed_is_not_elsewhere(answer: Answer) -> None:
    result = answer(f"{FULL}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2)))
    first = result.findings[0]
    assert (first.id, first.role) == ("oom-masked-as-nccl-timeout", "cascade")
    assert first.against[0] == "0.log:1 came first and belongs to it; why that happened is not in these logs"
    assert (result.is_cause_unknown, result.unexplained, result.ranks.failed_first) == (False, False, 3)


def test_only_timeouts_are_no_cause_and_that_is_held_against_them(answer: Answer) -> None:
    result = answer("\n".join(WAITED.format(rank) for rank in (0, 1, 3)) + "\n[rank2]: step 811\n")
    assert all(finding.role != "root" and finding.confidence < CERTAIN for finding in result.findings)
    assert any("the cause itself is not in these logs" in item for item in result.findings[0].against)
    assert (result.ranks.first_failure, result.ranks.failed_first, result.ranks.absent) == (None, None, (2,))
    assert result.next_step is not None
    assert "rank 2" in result.next_step.text


@pytest.mark.parametrize("far", [0, 60])
def test_what_no_entry_knows_and_came_first_is_the_failure_not_the_waiting_of_the_others(
    answer: Answer, far: int
) -> None:
    waiting = "".join(f"{rank}: {WAITED.format(rank)}\n" for rank in range(64) if rank != 17)
    ended = "slurmstepd: error: *** STEP 4711.0 ON n01 CANCELLED AT 2026-11-21T03:14:20 ***\n"
    result = answer(srun=RAISED.format("17: ") + "0: step 812\n" * far + waiting + ended)
    assert (result.is_cause_unknown, result.unexplained) == (True, True)
    assert (result.ranks.failed_first, result.ranks.absent) == (17, (17,))
    assert result.ranks.known == tuple(range(64))
    assert any("rank 17 reported no timeout while 63 others" in line.text for line in result.observations)
    message = " ".join(result.findings[0].against)
    assert "the cause is not this; rank 17 failed first: srun:3 webdataset.ShardError: s3://corpus" in message
    assert "not in these logs" not in message
    assert "failed before" not in message
    assert result.next_step is not None
    assert "what rank 17 printed at `srun:3`" in result.next_step.text
    assert result.next_step.command == ""


@pytest.mark.parametrize(
    ("own", "left"),
    [
        ("acme.data.ShardManifestError: 4096 rows are listed", "recvValue failed on SocketImpl(fd=3): got 0 bytes"),
        ("RuntimeError: Expected all tensors to be on the same device", "RuntimeError: Connection reset by peer"),
    ],
)
def test_the_ranks_that_were_left_name_no_cause_either(answer: Answer, own: str, left: str) -> None:
    result = answer(f"[rank0]: {own}\n[rank1]: {left}\n")
    assert result.findings[0].role == "cascade"
    assert result.findings[0].against[0] == f"the cause is not this; rank 0 failed first: 0.log:1 {own}"
    assert result.unexplained


def test_of_logs_without_times_the_one_of_the_rank_that_did_not_wait_tells(answer: Answer) -> None:
    waiting = {f"rank_{rank}.log": f"step 811\n{WAITED.format(rank)}\n" for rank in (0, 1, 2)}
    result = answer(**waiting, **{"rank_3.log": "step 811\n" * 90 + RAISED.format("")})
    assert (result.unexplained, result.ranks.failed_first, result.ranks.absent) == (True, 3, (3,))


def test_an_exception_that_a_rank_survived_does_not_explain_why_it_waited(answer: Answer) -> None:
    waiting = "".join(f"{WAITED.format(rank)}\n" for rank in (0, 1, 3))
    result = answer(RAISED.format("[rank1]: ") + "step 1\n" * 60 + waiting + "[rank2]: step 811\n")
    assert (result.is_cause_unknown, result.unexplained) == (False, False)
    assert "another failure was printed: 0.log:3" in result.findings[0].against[0]
    assert result.next_step is not None
    assert "rank 2" in result.next_step.text


def test_a_failure_in_words_is_read_first_and_leaves_the_log_explained(answer: Answer) -> None:
    waiting = "".join(f"{WAITED.format(rank)}\n" for rank in (0, 1, 2))
    result = answer("[rank3]: ERROR the shard server refused the token\n" + waiting)
    assert (result.is_cause_unknown, result.unexplained) == (True, False)
    assert "rank 3 failed first: 0.log:1 ERROR the shard" in result.findings[0].against[0]
    assert result.next_step is not None
    assert "what rank 3 printed at `0.log:1`" in result.next_step.text


@pytest.mark.parametrize(
    "left",
    [
        "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 3.",
        "[W228 18:45:15.738 socket.cpp:462] [c10d] waitForInput: poll for socket returned 0, likely a timeout",
    ],
)
def test_what_a_rank_prints_because_the_others_left_is_no_first_failure(answer: Answer, left: str) -> None:
    waiting = "".join(f"{WAITED.format(rank)}\n" for rank in (0, 1, 2))
    result = answer(waiting + f"[rank3]: {left}\n")
    assert (result.ranks.first_failure, result.unexplained, result.ranks.absent) == (None, False, (3,))


def test_the_kernels_log_and_the_launchers_are_read_together(answer: Answer) -> None:
    result = answer(**{"job.log": f"step 1\n{ENDED}", "dmesg": KILLED})
    assert result.findings[0].id == "host-oom-killed"
    assert {line.source for line in result.findings[0].evidence} == {"job.log", "dmesg"}
    assert result.ranks.failed_first == 2


def test_a_failure_that_no_entry_knows_is_unexplained_and_shown(answer: Answer) -> None:
    result = answer("step 1\n[rank2]: acme.sharding.ShardError: shard 17 of 32 has 4096 rows\n")
    assert result.unexplained
    assert all(finding.confidence < LIKELY for finding in result.findings)
    assert [(item.line.number, item.line.rank) for item in result.failures] == [(2, 2)]
    assert (result.ranks.failed_first, result.next_step) == (2, None)


def test_nothing_failed_is_neither_a_finding_nor_unexplained(answer: Answer) -> None:
    result = answer("".join(f"[rank{n % 4}]: step {n}: loss 2.3, all_reduce took 3 ms\n" for n in range(500)))
    assert (result.findings, result.failures, result.unexplained, result.next_step) == ((), (), False, None)


def test_a_likeness_of_words_is_called_that(answer: Answer) -> None:
    result = answer("[rank2]: acme.ShardError: the checkpoint of 4 ranks cannot be resumed with 8 ranks\n")
    assert result.findings
    assert {finding.role for finding in result.findings} == {"similar"}
    assert all(
        finding.against == ("none of its signatures was printed; only the wording is similar",)
        for finding in result.findings
    )


def test_an_answer_is_one_json_document_and_the_same_each_time(answer: Answer) -> None:
    log = f"{OOM}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2))
    first, second = (json.dumps(answer(log).to_json()) for _ in range(2))
    assert first == second
    document = json.loads(first)
    assert set(document) >= {
        "findings",
        "unexplained",
        "ranks",
        "observations",
        "seen",
        "next_step",
        "read",
        "problems",
    }
    cited = document["findings"][0]["evidence"][0]
    assert set(cited) == {"source", "line", "rank", "time", "text"}


def test_the_order_of_the_files_does_not_change_the_first_answer(answer: Answer) -> None:
    logs = {"rank3.log": OOM, **{f"rank{rank}.log": WAITED.format(rank) for rank in (0, 1, 2)}}
    forward, backward = answer(**logs), answer(**dict(reversed(logs.items())))
    assert forward.findings[0].id == backward.findings[0].id
    assert forward.ranks.failed_first == backward.ranks.failed_first == 3


STEPS_TO_THE_END = "".join(
    f"[rank{rank}]: step {step}/20 loss 1.{step:02}\n" for step in range(1, 21) for rank in (0, 1)
)


def test_a_timeout_behind_the_last_step_ended_the_job(answer: Answer) -> None:
    result = answer(STEPS_TO_THE_END + "".join(f"{WAITED.format(rank)}\n" for rank in (0, 1)))
    assert result.findings
    assert result.brief.decisive


def test_what_was_survived_before_the_last_step_is_no_finding(answer: Answer) -> None:
    result = answer(RAISED.format("[rank1]: ") + STEPS_TO_THE_END)
    assert (result.findings, result.unexplained, result.next_step) == ((), False, None)
