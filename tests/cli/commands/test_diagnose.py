"""`kb diagnose` as an engineer with a dead job meets it: the real command on real files."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from tests.support.console import ContentRoot, Ended, Kb

SHM = "NCCL WARN Error while creating shared memory segment /dev/shm/nccl-{rank:04x}Zk (size 9637888)"
OOM = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/w/train.py", line 180, in main
[rank3]:     loss = model(**batch).loss
[rank3]:   File "/opt/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1775, in _call_impl
[rank3]:     return forward_call(*args, **kwargs)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.96 GiB. GPU 3 has a total capacity of 79.11 GiB
"""
SUMMARY = """\
E1121 03:14:10.001 71242 torch/distributed/elastic/multiprocessing/api.py:988] failed (exitcode: -6) local_rank: 0
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Root Cause (first observed failure):
[0]:
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 71300)
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID 71300
"""
UNKNOWN = "step 1\n[rank2]: acme.sharding.ShardError: shard 17 of 32 has 4096 rows, peer 10.0.3.7 has 4095\n"
HEALTHY = "".join(f"[rank{n % 4}]: step {n}: loss {2 - n / 99:.3f}, lr 1e-5\n" for n in range(99)) + "done\n"


def watchdog(rank: int, seq: int = 812, op: str = "ALLREDUCE", second: int = 5) -> str:
    call = f"WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn=503316, NumelOut=503316, Timeout(ms)=600000)"
    head = f"[rank{rank}]:[E1121 03:14:{second:02}.118 ProcessGroupNCCL.cpp:"
    return (
        f"{head}683] [Rank {rank}] Watchdog caught collective operation timeout: {call} ran for 600013 milliseconds\n"
        f"{head}744] [Rank {rank}] Some NCCL operations have failed or timed out. Due to the asynchronous nature of CUDA "
        "kernels, subsequent GPU operations might run on corrupted/incomplete data.\n"
        f"{head}758] [Rank {rank}] To avoid data inconsistency, we are taking the entire process down.\n"
        "frame #0: c10::Error::Error(c10::SourceLocation, std::__cxx11::basic_string<char>) + 0x80 (0x7f in libc10.so)\n"
    )


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    path.mkdir()
    return path


def diagnosed(kb: Kb, *args: str | Path, stdin: bytes = b"") -> Any:
    """The one document; diagnostics of a build of the index aside, nothing stands on stderr."""
    ended = kb("diagnose", *args, "--json", stdin=stdin)
    assert ended.code in (0, 1), ended.err
    assert ended.json["schema"] == "kb.diagnose.v1"
    assert ended.json["ok"]
    return ended.json


def ids(answer: Any) -> list[str]:
    return [item["id"] for item in answer["findings"]]


def test_the_answer_names_the_entry_the_line_the_rank_and_the_next_step(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY + "[rank1]: " + SHM.format(rank=1) + "\n")
    ended = kb("diagnose", "train.log")
    assert ended.code == 0
    assert ended.out.startswith("1. NCCL: Error while creating shared memory segment")
    assert "shm-too-small root · confidence 0.9" in ended.out
    assert "   line     train.log:101 rank 1  NCCL WARN Error while creating" in ended.out
    assert "   first    rank 1 failed first: train.log:101" in ended.out
    assert "   run      kb verify shm-too-small" in ended.out
    assert "\x1b" not in ended.out, "no colour where there is no terminal"


def test_a_flood_of_64_ranks_is_one_piece_of_evidence_with_a_count(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("".join(f"[rank{r}]: {SHM.format(rank=r)}\n" for r in range(64)))
    first = diagnosed(kb, "train.log")["findings"][0]
    assert (first["id"], first["count"], first["ranks"]) == ("shm-too-small", 64, list(range(64)))
    assert len(first["evidence"]) < 10
    assert "64 lines in all, of ranks 0-63" in kb("diagnose", "train.log").out


@pytest.mark.parametrize("is_late", [False, True])
def test_an_oom_stands_above_the_timeouts_and_the_launcher(kb: Kb, tmp_path: Path, is_late: bool) -> None:
    waiting = "".join(watchdog(rank) for rank in (0, 1, 2, 4))
    (tmp_path / "job.log").write_text(HEALTHY + (waiting + OOM if is_late else OOM + waiting))
    answer = diagnosed(kb, "job.log")
    assert ids(answer)[0] == "oom-activations"
    assert answer["findings"][0]["role"] == "root"
    assert "oom-masked-as-nccl-timeout" in ids(answer)
    assert answer["ranks"]["failed_first"] == 3
    assert answer["ranks"]["absent"] == [3]
    assert answer["ranks"]["first_failure"]["text"].startswith("torch.OutOfMemoryError")


def test_a_rank_that_waited_is_not_called_the_first_whatever_torchrun_says(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(HEALTHY + "".join(watchdog(rank) for rank in (0, 1, 3)) + SUMMARY)
    ended = kb("diagnose", "job.log")
    assert "failed first" not in ended.out
    assert "   absent   rank 2: did not wait where the others waited" in ended.out
    assert "next     Read what rank 2 did" in ended.out
    ranks = diagnosed(kb, "job.log")["ranks"]
    assert (ranks["failed_first"], ranks["absent"]) == (None, [2])


def test_other_operations_at_one_number_are_divergence_and_the_rank_is_named(kb: Kb, tmp_path: Path) -> None:
    lines = [watchdog(rank, op="ALLGATHER" if rank == 2 else "ALLREDUCE") for rank in range(4)]
    (tmp_path / "job.log").write_text(HEALTHY + "".join(lines))
    answer = diagnosed(kb, "job.log")
    assert ids(answer)[0] == "rank-divergent-collectives"
    assert [(item["rank"], item["line"]) for item in answer["observations"]] == [(2, 109)]
    assert "rank 2 in ALLGATHER" in answer["observations"][0]["text"]


def test_the_folders_that_torchrun_leaves_name_the_ranks(kb: Kb, job: Path) -> None:
    for rank in range(3):
        folder = job / "none_ab12" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text("step 1\nstep 2\n")
        (folder / "stderr.log").write_text(SHM.format(rank=rank) + "\n" if rank == 2 else "")
    answer = diagnosed(kb, job)
    (cited,) = answer["findings"][0]["evidence"]
    assert (cited["rank"], cited["line"], cited["source"]) == (2, 1, f"{job}/none_ab12/attempt_0/2/stderr.log")
    assert answer["ranks"]["failed_first"] == 2
    assert answer["read"]["sources"] >= 4


def test_times_decide_which_rank_was_first_not_the_order_of_the_files(kb: Kb, job: Path) -> None:
    for rank, time in ((0, "03:14:09"), (1, "03:13:01")):
        line = f"E1121 {time}.377000 71242 comm.cc:12] {SHM.format(rank=rank)}\n"
        (job / f"rank{rank}.log").write_text(line)
    answer = diagnosed(kb, job)
    assert answer["ranks"]["failed_first"] == 1
    assert answer["ranks"]["first_failure"]["source"].endswith("rank1.log")


def test_without_times_several_files_do_not_tell_who_was_first(kb: Kb, job: Path) -> None:
    for rank in (0, 1):
        (job / f"rank{rank}.log").write_text(SHM.format(rank=rank) + "\n")
    assert diagnosed(kb, job)["ranks"]["failed_first"] is None
    assert "several ranks failed; order unknown" in kb("diagnose", job).out


def test_standard_input_and_packed_files_are_read_as_plain_ones_are(kb: Kb, tmp_path: Path) -> None:
    log = (HEALTHY + "[rank1]: " + SHM.format(rank=1) + "\n").encode()
    (tmp_path / "train.log").write_bytes(log)
    (tmp_path / "packed").write_bytes(gzip.compress(log))
    plain, packed, piped = diagnosed(kb, "train.log"), diagnosed(kb, "packed"), diagnosed(kb, "-", stdin=log)
    places = [item["findings"][0]["evidence"][0] for item in (plain, packed, piped)]
    assert [place.pop("source") for place in places] == ["train.log", "packed", "-"]
    assert places[0] == places[1] == places[2]


def test_chinese_words_around_the_error_change_nothing(kb: Kb, tmp_path: Path) -> None:
    log = "[2026-11-21 03:00:00] 开始训练，共 8 卡\n[2026-11-21 03:05:00] 错误：3 号卡显存不足\n" + OOM
    (tmp_path / "train.log").write_text(log + "训练失败，请检查日志\n")
    answer = diagnosed(kb, "train.log")
    assert answer["findings"][0]["id"].startswith("oom-")
    assert answer["ranks"]["failed_first"] == 3


def test_a_healthy_log_is_not_explained_and_not_unexplained(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    ended = kb("diagnose", "train.log")
    assert ended.code == 1
    assert ended.out == "no line reports a failure in English or Chinese: 100 lines of 1 file read\n"
    answer = diagnosed(kb, "train.log")
    assert (answer["findings"], answer["unexplained"], answer["next_step"]) == ([], False, None)


def test_an_empty_file_is_said_to_be_empty(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").touch()
    ended = kb("diagnose", "train.log")
    assert (ended.code, ended.out) == (1, "there is nothing to read: 1 file of 0 bytes\n")


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
    assert "rank failed" not in ended.out


def test_what_nothing_explains_is_shown_as_it_was_seen(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(UNKNOWN)
    ended = kb("diagnose", "train.log")
    assert ended.code == 1
    assert ended.out.startswith("no confident match\n")
    assert "   seen     train.log:2 rank 2  acme.sharding.ShardError: shard 17 of 32" in ended.out
    assert "   first    rank 2 failed first: train.log:2" in ended.out
    assert "--save-unexplained" in ended.out
    answer = diagnosed(kb, "train.log")
    assert (answer["unexplained"], answer["saved"]) == (True, None)


def test_what_failed_first_stands_above_what_followed_and_is_to_be_read(kb: Kb, tmp_path: Path) -> None:
    raised = "2026-11-21 03:04:05 [rank2]: acme.ShardError: shard 17 of 32 has 4096 rows\n"
    (tmp_path / "job.log").write_text(raised + "".join(watchdog(rank) for rank in (0, 1, 3)))
    ended = kb("diagnose", "job.log", "--verify")
    assert ended.code == 1
    lines = ended.out.splitlines()
    assert lines[0] == "no confident match: no entry explains the first failure"
    assert lines[1].startswith(
        "   first    rank 2 failed first: 2026-11-21 03:04:05  job.log:1 rank 2  acme.ShardError"
    )
    assert ended.out.count("failed first: ") == 1
    assert "   then     what followed fits: " in ended.out
    assert "next     Read what rank 2 printed at `job.log:1`" in ended.out
    assert "   run      " not in ended.out
    assert "nothing to verify" in ended.err


def test_a_failure_in_words_stands_above_the_findings(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank2]: ERROR token refused\n" + "".join(watchdog(rank) for rank in (0, 1, 3)))
    ended = kb("diagnose", "job.log")
    assert ended.code == 0
    assert ended.out.startswith("   first    rank 2 failed first: job.log:1 rank 2  ERROR token refused\n\n1. ")
    assert ended.out.count("failed first: job.log:1 rank 2  ") == 1


def test_a_kernels_time_counts_from_its_start(kb: Kb, tmp_path: Path) -> None:
    killed = "Memory cgroup out of memory: Killed process 71302 (python) total-vm:289331200kB, anon-rss:128331200kB"
    (tmp_path / "dmesg").write_text(f"[1204455.902233] {killed}\n")
    assert "   first    1204455.902 s  dmesg:1  Memory cgroup" in kb("diagnose", "dmesg").out


def test_what_kb_concluded_is_not_shown_as_a_line_of_a_log(kb: Kb, job: Path) -> None:
    for rank in range(4):
        op = "ALLGATHER" if rank == 2 else "ALLREDUCE"
        (job / f"rank_{rank}.log").write_text("step 1\n" + watchdog(rank, op=op))
    ended = kb("diagnose", job)
    assert "   inferred ranks timed out in different collectives at SeqNum=812" in ended.out
    assert "kb: " not in ended.out


def test_the_probe_that_reads_a_log_is_given_this_one(kb: Kb, tmp_path: Path) -> None:
    numbers = "Of the allocated memory 60.90 GiB is allocated by PyTorch, and 14.14 GiB is reserved by PyTorch but unallocated."
    text = OOM.replace("79.11 GiB", f"79.14 GiB of which 904.19 MiB is free. {numbers}").replace("1.96", "1.31")
    (tmp_path / "train.log").write_text(text)
    assert "run      kb verify oom-fragmentation --set log=train.log\n" in kb("diagnose", "train.log").out
    assert "run      kb verify oom-fragmentation\n" in kb("diagnose", "-", stdin=text.encode()).out


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


def test_the_limit_holds_for_text_and_document(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text(OOM + watchdog(0) + watchdog(1) + SUMMARY)
    assert len(diagnosed(kb, "job.log")["findings"]) > 2
    assert len(diagnosed(kb, "job.log", "--limit", "2")["findings"]) == 2
    assert "2. " not in kb("diagnose", "job.log", "--limit", "1").out


@pytest.mark.usefixtures("few_entries")
def test_a_team_entry_explains_and_its_probe_is_run(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("broken-thing")
    (tmp_path / "train.log").write_text("[rank5]: RuntimeError: the thing broke: code 7\n")
    proved = kb("diagnose", "train.log", "--verify", "--json")
    assert proved.code == 0, proved.err
    assert [item["id"] for item in proved.json["reports"]] == ["broken-thing"]
    assert proved.json["reports"][0]["verdict"] == "verified"
    assert proved.json["summary"]["verified"] == 1
    assert ids(proved.json)[0] == "broken-thing"
    assert proved.json["findings"][0]["origin"] == str(content.path)
    result = kb("diagnose", "train.log", "--verify")
    assert result.code == 0
    assert "broken-thing root" in result.out
    assert "verified" in result.out.split("   run      ")[1]


def test_with_nothing_to_verify_it_is_one_document_and_exit_1(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    ended = kb("diagnose", "train.log", "--verify", "--json")
    assert ended.code == 1
    assert ended.json["reports"] == []
    assert "nothing to verify" in ended.err


@pytest.mark.parametrize(
    "args", [["missing.log"], ["train.log", "missing.log"], ["empty"], ["train.log", "--python", "python3"]]
)
def test_bad_input_is_exit_2_with_one_document(kb: Kb, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    (tmp_path / "empty").mkdir()
    ended: Ended = kb("diagnose", *args, "--json")
    assert ended.code == 2
    assert ended.json["ok"] is False
    assert ended.json["error"]["message"]
    plain = kb("diagnose", *args)
    assert (plain.code, plain.out) == (2, "")
    assert "error:" in plain.err


@pytest.mark.parametrize("args", [[], ["train.log", "--limit", "0"]])
def test_a_wrong_call_is_exit_2(kb: Kb, tmp_path: Path, args: list[str]) -> None:
    (tmp_path / "train.log").write_text(HEALTHY)
    assert kb("diagnose", *args).code == 2


def test_what_could_not_be_read_is_said_and_the_rest_is_answered(kb: Kb, job: Path) -> None:
    (job / "model.bin").write_bytes(b"PK\x03\x04" + b"\0" * 99)
    (job / "train.log.gz").write_bytes(gzip.compress(SHM.format(rank=0).encode() + b"\n" + b"x" * 9999)[:-9])
    answer = diagnosed(kb, job)
    assert ids(answer)[0] == "shm-too-small"
    assert any("binary" in item for item in answer["problems"])
    assert any("ends too early" in item for item in answer["problems"])
    assert "kb: " in kb("diagnose", job).err
