"""From a scan to an answer, with the entries that ship: what is said, how sure, and what is held against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kb import root
from kb.diagnose.diagnosis import CONFIDENCE, Diagnosis, diagnose
from kb.diagnose.matcher import Matcher
from kb.diagnose.nextstep import CERTAIN, LIKELY
from kb.diagnose.scan import scan
from kb.diagnose.source import Stream
from kb.index import open_index

Answer = Callable[..., Diagnosis]

SHM = "[rank1]: NCCL WARN Error while creating shared memory segment /dev/shm/nccl-00ab (size 9637888)"
OOM = "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has a total capacity of 79 GiB"
WAITED = (
    "[rank{0}]:[E1121 03:14:05.118 ProcessGroupNCCL.cpp:683] [Rank {0}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum=812, OpType=ALLREDUCE, NumelIn=503316, NumelOut=503316, Timeout(ms)=600000) ran for 600013 ms"
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


@pytest.fixture
def answer(home: Path) -> Iterator[Answer]:
    """Diagnose texts, each a log of its name; the index of the built-in entries lies in the cache already."""
    with open_index(root.configured(())) as index:
        matcher = Matcher(index.signatures)

        def given(*anonymous: str, **logs: str) -> Diagnosis:
            texts = {**{f"{number}.log": text for number, text in enumerate(anonymous)}, **logs}
            streams = [Stream(name, iter([text.encode()])) for name, text in texts.items()]
            return diagnose(index, scan(streams, matcher))

        yield given


def test_a_cause_in_words_is_certain_and_cited(answer: Answer) -> None:
    found = answer(f"step 1\n{SHM}\n")
    first = found.findings[0]
    assert (first.id, first.role) == ("shm-too-small", "root")
    assert CERTAIN <= first.confidence <= CONFIDENCE["root"][0]
    assert [(line.source, line.number, line.rank) for line in first.evidence] == [("0.log", 2, 1)]
    assert not found.unexplained


def test_confidence_falls_with_the_place(answer: Answer) -> None:
    found = answer(f"{OOM}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2)))
    confidences = [one.confidence for one in found.findings]
    assert confidences == sorted(confidences, reverse=True)
    assert len(confidences) > 1


def test_what_follows_from_a_seen_cause_says_so(answer: Answer) -> None:
    found = answer(f"{OOM}\n" + "\n".join(WAITED.format(rank) for rank in (0, 1, 2)))
    assert found.findings[0].role == "root"
    masked = next(one for one in found.findings if one.id == "oom-masked-as-nccl-timeout")
    assert masked.role == "cascade"
    assert found.findings[0].id in masked.caused_by
    assert any(one.startswith("it follows from") for one in masked.against)
    assert (found.ranks.failed, found.ranks.absent) == (3, (3,))


def test_only_timeouts_are_no_cause_and_that_is_held_against_them(answer: Answer) -> None:
    found = answer("\n".join(WAITED.format(rank) for rank in (0, 1, 3)) + "\n[rank2]: step 811\n")
    assert all(one.role != "root" and one.confidence < CERTAIN for one in found.findings)
    assert any("the cause itself is not in these logs" in one for one in found.findings[0].against)
    assert (found.ranks.first, found.ranks.failed, found.ranks.absent) == (None, None, (2,))
    assert found.next_step is not None
    assert "rank 2" in found.next_step.text


def test_the_kernels_log_and_the_launchers_are_read_together(answer: Answer) -> None:
    found = answer(**{"job.log": f"step 1\n{ENDED}", "dmesg": KILLED})
    assert found.findings[0].id == "host-oom-killed"
    assert {line.source for line in found.findings[0].evidence} == {"job.log", "dmesg"}
    assert found.ranks.failed == 2


def test_a_failure_that_no_entry_knows_is_unexplained_and_shown(answer: Answer) -> None:
    found = answer("step 1\n[rank2]: acme.sharding.ShardError: shard 17 of 32 has 4096 rows\n")
    assert found.unexplained
    assert all(one.confidence < LIKELY for one in found.findings)
    assert [(one.line.number, one.line.rank) for one in found.seen] == [(2, 2)]
    assert (found.ranks.failed, found.next_step) == (2, None)


def test_nothing_failed_is_neither_a_finding_nor_unexplained(answer: Answer) -> None:
    found = answer("".join(f"[rank{n % 4}]: step {n}: loss 2.3, all_reduce took 3 ms\n" for n in range(500)))
    assert (found.findings, found.seen, found.unexplained, found.next_step) == ((), (), False, None)


def test_a_likeness_of_words_is_called_that(answer: Answer) -> None:
    found = answer("[rank2]: acme.ShardError: the checkpoint of 4 ranks cannot be resumed with 8 ranks\n")
    assert found.findings
    assert {one.role for one in found.findings} == {"similar"}
    assert all(one.against == ("no signature of it was printed, only the wording is alike",) for one in found.findings)


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
    assert forward.ranks.failed == backward.ranks.failed == 3
