"""Which processes of a node are ranks, of which job, by what /proc says of them."""

from __future__ import annotations

from typing import Any

import pytest

from kb.capture.agent import ranks
from kb.capture.agent.jobs import group_jobs
from kb.capture.agent.ranks import Family, Process, find_ranks

TORCH = ["/env/lib/libtorch_cpu.so"]
JOB = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "WORLD_SIZE": "2"}


def process(pid: int, parent: Any = 1, torch: Any = True, name: Any = "python", **environment: Any) -> Process:
    return Process(pid, parent, pid, name, environment, ["python", "train.py"], TORCH if torch else [], "net:[1]")


def found(*given: Process) -> list[tuple[int | None, int]]:
    return [(rank.rank, rank.process.pid) for rank in find_ranks(Family(given))]


def jobs(*given: Process) -> list[dict[str, Any]]:
    family = Family(given)
    return group_jobs(find_ranks(family), family)


@pytest.fixture(autouse=True)
def sockets(monkeypatch: pytest.MonkeyPatch) -> dict[int, set[str]]:
    """Sockets by pid; none unless a test says so."""
    held: dict[int, set[str]] = {}
    monkeypatch.setattr(ranks, "connections", lambda pid: held.get(pid, set()))
    return held


def test_the_shell_around_a_rank_and_the_workers_below_it_are_none() -> None:
    shell = process(10, torch=False, name="bash", RANK="0", **JOB)
    rank = process(11, 10, RANK="0", **JOB)
    workers = [process(pid, 11, RANK="0", **JOB) for pid in (12, 13)]
    assert found(shell, rank, *workers) == [(0, 11)]


def test_a_launcher_with_a_number_of_slurm_is_no_rank() -> None:
    launcher = process(10, SLURM_PROCID="1")
    ranks_ = [process(20 + rank, 10, RANK=str(8 + rank), SLURM_PROCID="1", **JOB) for rank in range(2)]
    (job,) = jobs(launcher, *ranks_)
    assert [rank["rank"] for rank in job["ranks"]] == [8, 9]
    assert job["launcher"] == 10


def test_ranks_that_srun_started_have_the_number_of_slurm() -> None:
    assert found(process(10, SLURM_PROCID="0"), process(11, SLURM_PROCID="1")) == [(0, 10), (1, 11)]


def test_a_rank_that_still_imports_torch_belongs_to_its_job() -> None:
    assert found(process(10, RANK="0", **JOB), process(11, torch=False, RANK="1", **JOB)) == [(0, 10), (1, 11)]


def test_the_first_process_of_lightning_is_rank_0() -> None:
    first = process(10)
    others = [process(10 + local, 10, LOCAL_RANK=str(local), NODE_RANK="1", **JOB) for local in (1, 2, 3)]
    assert found(first, *others) == [(4, 10), (5, 11), (6, 12), (7, 13)]


def test_processes_of_mp_spawn_have_the_order_of_their_start(sockets: dict[int, set[str]]) -> None:
    sockets.update({11: {"a"}, 12: {"b"}})
    given = find_ranks(Family([process(10), process(12, 10), process(11, 10)]))
    assert [(rank.rank, rank.process.pid) for rank in given] == [(0, 11), (1, 12)]
    assert given[0].source == "order in which process 10 started them"


def test_workers_of_a_loader_are_no_ranks_of_a_single_process(sockets: dict[int, set[str]]) -> None:
    sockets.update({10: {"a"}, 11: {"a"}, 12: {"a"}})  # inherited by the fork
    assert found(process(10), process(11, 10), process(12, 10)) == []


def test_two_jobs_with_one_address_are_told_apart_by_their_launchers() -> None:
    launchers = [process(10, torch=False), process(20, torch=False)]
    members = [
        process(launcher + 1 + rank, launcher, RANK=str(rank), **JOB) for launcher in (10, 20) for rank in (0, 1)
    ]
    assert [job["id"] for job in jobs(*launchers, *members)] == [10, 20]


def test_two_launchers_of_one_job_on_one_node_are_one_job() -> None:
    launchers = [process(10, torch=False), process(20, torch=False)]
    members = [process(11, 10, RANK="0", **JOB), process(21, 20, RANK="1", **JOB)]
    (job,) = jobs(*launchers, *members)
    assert (job["launcher"], job["local_size"]) == (None, 2)


def test_a_survey_that_ends_in_a_process_names_the_one_that_blocked() -> None:
    text = '{"begin": {"pid": 7}}\n{"pid": 7, "denied": 1001}\n{"begin": {"pid": 8}}\n'
    known, denied, blocked = ranks.read_survey(text)
    assert (known, len(denied), blocked) == ([], 1, 8)
