"""`kb diagnose` as an engineer with a dead job meets it: the real command on real files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb
from tests.support.job_logs import HEALTHY, OOM, SHM, SUMMARY, diagnosed, ids, watchdog


def test_the_answer_names_the_entry_the_line_the_rank_and_the_next_step(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(HEALTHY + "[rank1]: " + SHM.format(rank=1) + "\n")
    ended = kb("diagnose", "train.log")
    assert ended.code == 0
    brief, details = ended.out.split("\n\n", 1)
    assert brief.startswith("   cause    NCCL: Error while creating shared memory segment")
    assert "\n   line     NCCL WARN Error while creating shared memory segment" in brief
    assert "\n   fix      " in brief
    assert details.startswith("1. NCCL: Error while creating shared memory segment")
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


def test_chinese_words_around_the_error_change_nothing(kb: Kb, tmp_path: Path) -> None:
    log = "[2026-11-21 03:00:00] 开始训练，共 8 卡\n[2026-11-21 03:05:00] 错误：3 号卡显存不足\n" + OOM
    (tmp_path / "train.log").write_text(log + "训练失败，请检查日志\n")
    answer = diagnosed(kb, "train.log")
    assert answer["findings"][0]["id"].startswith("oom-")
    assert answer["ranks"]["failed_first"] == 3


UNKNOWN = "[rank1]: Traceback (most recent call last):\n[rank1]: ValueError: the flux capacitor is not calibrated\n"


def test_what_nobody_knows_ends_with_what_to_look_at(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text(UNKNOWN)
    ended = kb("diagnose", "train.log")
    assert ended.code == 1
    assert "1. Which rank failed first" in ended.out
    document = kb("diagnose", "train.log", "--json").json
    assert document["unexplained"]
    assert document["triage"][0]["command"].startswith("kb diagnose ")
    chinese = kb("diagnose", "train.log", "--json", "--lang", "zh").json["triage"]
    assert [item["command"] for item in chinese] == [item["command"] for item in document["triage"]]
    assert "哪个 rank" in chinese[0]["ask"]


def test_what_a_log_says_chooses_what_to_look_at(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank0]: ERROR: the job is stuck, no progress for 3600 s, giving up\n")
    commands = [item["command"] for item in kb("diagnose", "job.log", "--json").json["triage"]]
    assert any("py-spy" in command for command in commands)


def test_an_explained_log_has_no_triage(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("[rank1]: " + SHM.format(rank=1) + "\n")
    assert diagnosed(kb, "train.log")["triage"] == []


def test_a_failure_in_words_stands_above_the_findings(kb: Kb, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("[rank2]: ERROR token refused\n" + "".join(watchdog(rank) for rank in (0, 1, 3)))
    ended = kb("diagnose", "job.log")
    assert ended.code == 0
    assert ended.out.startswith("   cause    unknown: no entry explains the first failure\n")
    assert "   line     rank 2 failed first: ERROR token refused (job.log:1)\n" in ended.out
    assert ended.out.count("failed first: ERROR") == 1


def test_a_kernels_time_counts_from_its_start(kb: Kb, tmp_path: Path) -> None:
    killed = "Memory cgroup out of memory: Killed process 71302 (python) total-vm:289331200kB, anon-rss:128331200kB"
    (tmp_path / "dmesg").write_text(f"[1204455.902233] {killed}\n")
    assert "   first    1204455.902 s  dmesg:1  Memory cgroup" in kb("diagnose", "dmesg").out


def test_the_probe_that_reads_a_log_is_given_this_one(kb: Kb, tmp_path: Path) -> None:
    numbers = "Of the allocated memory 60.90 GiB is allocated by PyTorch, and 14.14 GiB is reserved by PyTorch but unallocated."
    text = OOM.replace("79.11 GiB", f"79.14 GiB of which 904.19 MiB is free. {numbers}").replace("1.96", "1.31")
    (tmp_path / "train.log").write_text(text)
    assert "run      kb verify oom-fragmentation --set log=train.log\n" in kb("diagnose", "train.log").out
    assert "run      kb verify oom-fragmentation\n" in kb("diagnose", "-", stdin=text.encode()).out


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
