"""`kb diagnose`: which rank failed first, and which one the others waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.console import Kb
from tests.support.job_logs import HEALTHY, OOM, SHM, SUMMARY, diagnosed, ids, watchdog


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job"
    path.mkdir()
    return path


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


def test_what_kb_concluded_is_not_shown_as_a_line_of_a_log(kb: Kb, job: Path) -> None:
    for rank in range(4):
        op = "ALLGATHER" if rank == 2 else "ALLREDUCE"
        (job / f"rank_{rank}.log").write_text("step 1\n" + watchdog(rank, op=op))
    ended = kb("diagnose", job)
    assert "ranks timed out in different collectives at" in ended.out
    assert "kb: " not in ended.out
