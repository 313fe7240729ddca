"""Chooses the job of a node to capture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kb.errors import UsageError
from kb.harness.collective import name_ranks

MOST_LISTED = 8


def choose_job(listed: Mapping[str, Any], pid: int | None) -> Mapping[str, Any] | None:
    """The only job, or the job of process `pid`; None if no job runs. Raises `UsageError` if it is ambiguous."""
    jobs: Sequence[Mapping[str, Any]] = listed["jobs"]
    if not listed["has_pid"]:
        raise UsageError(f"there is no process {pid}", "`kb capture` without --pid looks for training jobs")
    if len(jobs) > 1:
        choices = no_choice((f"--pid {job['id']}", describe(job)) for job in jobs)
        raise UsageError(f"{len(jobs)} training jobs run on this node", choices)
    return jobs[0] if jobs else None


def no_choice(jobs: Iterable[tuple[str, str]]) -> str:
    """The hint if the job is ambiguous: the option that names each job, and its description."""
    lines = [f"`{option}`: {text}" for option, text in jobs]
    return f"name one: {'; '.join(lines[:MOST_LISTED])}" if lines else "no job runs there"


def describe(job: Mapping[str, Any]) -> str:
    """The job as text: `ranks 0-7 of 8, python train.py`."""
    ranks = [rank["rank"] for rank in job["ranks"] if rank["rank"] is not None]
    named = name_ranks(ranks) if ranks else f"process {job['ranks'][0]['pid']}"
    size = f" of {job['world_size']}" if job["world_size"] and ranks else ""
    slurm = f", Slurm job {job['slurm_job']}" if job["slurm_job"] else ""
    return f"{named}{size}{slurm}, {job['command'][:80]}"


def guessed_ranks(job: Mapping[str, Any]) -> str:
    """How ranks were found that no variable names; empty if all are named."""
    sources = {rank["rank_from"] for rank in job["ranks"] if rank["rank"] is not None and " " in rank["rank_from"]}
    return f"ranks are known only by the {sorted(sources)[0]}" if sources else ""


def offered_windows(windows: Mapping[str, Any]) -> list[str]:
    """What `--trigger` could ask: the dump pipes and debug servers that torch opened."""
    pipes = sorted(name for name, window in windows.items() if window and window.get("pipe"))
    servers = sorted(name for name, window in windows.items() if window and window.get("has_debug_server"))
    named = [("the dump pipe of NCCL", pipes), ("torch's debug server", servers)]
    return [f"{what} of {', '.join(ranks[:MOST_LISTED])}" for what, ranks in named if ranks]
