"""`kb diagnose` of what no entry explains: healthy logs, other programs, failures that are new."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import Kb
from tests.support.job_logs import HEALTHY, SHM, diagnosed, watchdog

UNKNOWN = "step 1\n[rank2]: acme.sharding.ShardError: shard 17 of 32 has 4096 rows, peer 10.0.3.7 has 4095\n"


def test_a_healthy_log_is_not_explained_and_not_unexplained(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    ended = kb("diagnose", "train.log")
    assert ended.code == 1
    assert ended.out == "no line reports a failure in English or Chinese: 100 lines of 1 file read\n"
    answer = diagnosed(kb, "train.log")
    assert (answer["findings"], answer["unexplained"], answer["next_step"]) == ([], False, None)


def test_advice_alone_explains_nothing(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(
        "[Rank 0] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA kernels, "
        "subsequent GPU operations might run on corrupted/incomplete data.\n"
        "This may indicate a possible application crash on rank 0 or a network set up issue.\n"
        "If reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to "
        "avoid fragmentation.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
    )
    answer = diagnosed(kb, "train.log")
    assert not answer["seen"]
    assert all(item["role"] == "similar" and item["confidence"] < 0.35 for item in answer["findings"])


FOREIGN = {
    "nginx": "2026/11/21 03:04:05 [error] 31#31: *1203 connect() failed (111: Connection refused) while connecting to "
    'upstream, client: 10.0.0.4\n10.0.0.4 - - [21/Nov/2026:03:06:01 +0000] "GET / HTTP/1.1" 502 157\n',
    "compiler": "gcc -O2 -c main.c -o main.o\nmain.c:12:5: error: unknown type name 'sizet'\nmake: *** [main.o] Error 1\n",
    "java": "java.lang.NullPointerException: s is null\n\tat com.acme.App.run(App.java:31)\n"
    "Caused by: java.net.SocketTimeoutException: Read timed out\n",
    "database": "2026-11-21 03:04:06.001 UTC [91] FATAL:  sorry, too many clients already\n"
    "2026-11-21 03:04:07.001 UTC [92] ERROR:  deadlock detected\n",
    "web": 'Traceback (most recent call last):\n  File "/app/views.py", line 12, in get\n    return d["x"]\nKeyError: \'x\'\n',
    "french": "03:04:05 Erreur : impossible d'ouvrir le fichier\n03:04:06 Échec de la connexion, délai dépassé\n",
}


@pytest.mark.parametrize("name", FOREIGN)
def test_the_log_of_another_trade_is_explained_by_nothing(kb: Kb, tmp_path: Path, name: str) -> None:
    (tmp_path / "other.log").write_text(FOREIGN[name])
    ended = kb("diagnose", "other.log")
    assert ended.code == 1
    assert not ended.out.startswith("1. ")
    assert "failed first: " not in ended.out


def test_the_log_of_another_program_asks_nobody_about_ranks(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "other.log").write_text(FOREIGN["web"])
    assert kb("diagnose", "other.log", "--json").json["triage"] == []


def test_what_nothing_explains_is_shown_as_it_was_seen(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(UNKNOWN)
    ended = kb("diagnose", "train.log")
    assert ended.code == 1
    assert ended.out.startswith("   cause    unknown: no confident match\n")
    assert "   line     rank 2 failed first: acme.sharding.ShardError: shard 17 of 32" in ended.out
    assert "(train.log:2)" in ended.out
    assert "--save-unexplained" in ended.out
    answer = diagnosed(kb, "train.log")
    assert (answer["unexplained"], answer["saved"]) == (True, None)


def test_what_failed_first_stands_above_what_followed_and_is_to_be_read(kb: Kb, tmp_path: Path) -> None:
    raised = "2026-11-21 03:04:05 [rank2]: acme.ShardError: shard 17 of 32 has 4096 rows\n"
    (tmp_path / "job.log").write_text(raised + "".join(watchdog(rank) for rank in (0, 1, 3)))
    ended = kb("diagnose", "job.log", "--verify")
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert lines[0] == "   cause    unknown: no entry explains the first failure"
    assert lines[1].startswith("   line     rank 2 failed first: 2026-11-21 03:04:05  acme.ShardError")
    assert ended.out.count("failed first: ") == 1
    assert "   then     what followed fits: " in ended.out
    assert "next     Read what rank 2 printed at `job.log:1`" in ended.out
    assert "kb verify" not in ended.out
    assert "nothing to verify" in ended.err


def test_what_the_job_survived_did_not_follow_its_failure(kb: Kb, tmp_path: Path) -> None:
    steps = [f"step {number} | loss 2.{number}\n" for number in range(10, 14)]
    warning = "UserWarning: None of the inputs have requires_grad=True. Gradients will be None\n"
    raised = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\nKeyError: 1\n'
    (tmp_path / "job.log").write_text(f"{steps[0]}{warning}{''.join(steps[1:])}{raised}")
    ended = kb("diagnose", "job.log")
    assert "KeyError: 1" in ended.out.splitlines()[1]
    assert "what followed fits" not in ended.out


def test_what_is_kept_is_redacted_and_becomes_a_draft(kb: Kb, tmp_path: Path, home: Path) -> None:
    (tmp_path / "train.log").write_text(UNKNOWN)
    answer = diagnosed(kb, "train.log", "--save-unexplained")
    kept = Path(answer["saved"])
    assert kept.is_relative_to(home)
    assert "10.0.3.7" not in kept.read_text()
    drafted = kb("new", "shard-odd", "--from", kept.stem, "--root", tmp_path / "team", "--json")
    assert drafted.code == 0, drafted.err
    assert "ShardError: shard 17 of 32" in Path(drafted.json["entry"]).read_text()
    result = kb("diagnose", "train.log", "--save-unexplained")
    assert f"kb new ID --from {kept.stem}" in result.out


def test_what_is_explained_is_not_kept(kb: Kb, tmp_path: Path, home: Path) -> None:
    (tmp_path / "train.log").write_text(SHM.format(rank=0) + "\n")
    assert diagnosed(kb, "train.log", "--save-unexplained")["saved"] is None
    assert not list(home.rglob("unexplained"))
