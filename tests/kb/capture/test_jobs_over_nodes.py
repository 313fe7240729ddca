"""Which ranks of different nodes are one job."""

from __future__ import annotations

from typing import Any

import pytest

from kb.capture.gather import Listing
from kb.capture.jobs import Job, choose, group_over_nodes
from kb.capture.transport.connection import Connection
from kb.errors import UsageError


def job(*ranks: int | None, address: str = "n0:29500", slurm: str = "", world: int | None = 4, **more: Any) -> Any:
    environment = more.pop("environment", {})
    source = more.pop("rank_from", "RANK")
    return {
        "id": 7, "launcher": None, "command": "python train.py", "address": address, "slurm_job": slurm,
        "world_size": world, "local_size": None,
        "ranks": [{"rank": rank, "rank_from": source, "pid": 10, "environment": environment} for rank in ranks],
        **more,
    }  # fmt: skip


def grouped(*nodes: Any, slurm_job: str = "") -> list[Job]:
    listings = [
        Listing(Connection(f"n{number}", ()), 0.1, tuple(jobs if isinstance(jobs, list) else [jobs]))
        for number, jobs in enumerate(nodes)
    ]
    return group_over_nodes(listings, slurm_job)


def ranks(job: Job) -> list[list[int]]:
    return [part.ranks for part in job.parts]


def test_ranks_that_meet_at_one_address_are_one_job_in_the_order_of_their_ranks() -> None:
    (found,) = grouped(job(2, 3), job(0, 1))
    assert ranks(found) == [[0, 1], [2, 3]]
    assert str(found) == "ranks 0-3 of 4, python train.py, on 2 nodes"


def test_without_an_address_the_slurm_job_says_it_or_the_run_id() -> None:
    assert len(grouped(job(0, 1, address="", slurm="7"), job(2, 3, address="", slurm="7"))) == 1
    assert len(grouped(job(0, address="", slurm="7"), job(0, address="", slurm="8"))) == 2
    assert [found.name for found in grouped(job(0, address="", slurm="7"), job(0, slurm="8"), slurm_job="8")] == [
        "8/n0:29500"
    ]
    runs = [job(rank, address="", environment={"TORCHELASTIC_RUN_ID": f"run-{rank % 2}"}) for rank in range(4)]
    assert [ranks(found) for found in grouped(*runs)] == [[[0], [2]], [[1], [3]]]


def test_whole_jobs_that_meet_at_loopback_are_one_per_node() -> None:
    assert len(grouped(*[job(0, 1, address="127.0.0.1:29500", world=2)] * 2)) == 2


def test_a_first_node_that_calls_itself_localhost_belongs_to_the_others() -> None:
    (found,) = grouped(job(0, 1, address="localhost:29500"), job(2, 3, address="master-0:29500"))
    assert ranks(found) == [[0, 1], [2, 3]]


def test_two_launchers_of_a_job_on_one_node_are_one_part() -> None:
    (found,) = grouped([job(0), job(1)], job(2, 3))
    assert ranks(found) == [[0, 1], [2, 3]]


def test_a_rank_that_is_there_twice_is_said() -> None:
    (found,) = grouped(job(0, 1), job(1, 2))
    assert list(found.problems()) == ["rank 1 runs more than once: an earlier start of the job may be left over"]


def test_ranks_that_are_guessed_on_each_node_are_not_known_over_nodes() -> None:
    (found,) = grouped(*[job(0, 1, address="", rank_from="order in which process 3 started them")] * 2)
    assert ranks(found) == [[], []]


def test_of_several_jobs_one_must_be_named() -> None:
    found = grouped([job(0, 1, world=2), job(0, 1, address="n0:29501", world=2)])
    with pytest.raises(UsageError, match="2 training jobs run on these nodes") as error:
        choose(found, None)
    assert "`--job n0:29501`: ranks 0 and 1 of 2" in error.value.hint
    chosen = choose(found, "n0:29501")
    assert chosen is found[1]
    assert choose([], None) is None
    with pytest.raises(UsageError, match="0 jobs are called 'x'"):
        choose(found, "x")
