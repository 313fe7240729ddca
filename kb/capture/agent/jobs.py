"""Groups the ranks of a node into jobs, each as the document with which a capture is requested."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

from .processes import RANK_NAMES
from .ranks import OF_JOB, Family, Process, Rank, job_key

LOOPBACK = ("localhost", "::1")


def group_jobs(ranks: Sequence[Rank], family: Family) -> List[Dict[str, Any]]:
    """The jobs. Ranks with equal address, port and job id are one job, or one per launcher if a rank occurs twice."""
    groups: Dict[Tuple[Any, ...], List[Rank]] = {}
    for rank in ranks:
        own = rank.source in RANK_NAMES and any(job_key(rank.process)[1:])
        key: Tuple[Any, ...] = job_key(rank.process) if own else (_launcher(rank, family) or rank.process.pid,)
        if not own and "started the other" in rank.source:
            key = (rank.process.pid,)
        groups.setdefault(key, []).append(rank)
    jobs = []
    for members in groups.values():
        numbers = [rank.rank for rank in members]
        if len(set(numbers)) == len(numbers):
            jobs.append(_job(members, family))
            continue
        by_launcher: Dict[Optional[int], List[Rank]] = {}
        for rank in members:
            by_launcher.setdefault(_launcher(rank, family), []).append(rank)
        jobs += [_job(part, family) for part in by_launcher.values()]
    return sorted(jobs, key=lambda job: job["id"])


def _launcher(rank: Rank, family: Family) -> Optional[int]:
    """The nearest ancestor that does not have this rank in its environment, as a shell around the rank does."""
    for process in family.above(rank.process):
        if not rank.process.rank()[1] or process.rank() != rank.process.rank():
            return process.pid
    return None


def _job(members: Sequence[Rank], family: Family) -> Dict[str, Any]:
    launchers = {_launcher(rank, family) for rank in members} - {None}
    launcher = launchers.pop() if len(launchers) == 1 else None
    if any(rank.process.pid == launcher for rank in members):
        launcher = None
    first = members[0].process
    sizes = {rank.process.environment.get("WORLD_SIZE", "") for rank in members}
    size = sizes.pop() if len(sizes) == 1 else ""
    return {
        "id": launcher or first.pid,
        "launcher": launcher,
        "command": " ".join(first.arguments)[:200],
        "address": ":".join(filter(None, (first.environment.get(name, "") for name in OF_JOB[:2]))),
        "slurm_job": first.environment.get("SLURM_JOB_ID", ""),
        "world_size": int(size) if size.isdigit() else None,
        "local_size": _local_size(first, size),
        "ranks": [_described(rank, family) for rank in members],
    }


def _local_size(process: Process, size: str) -> Optional[int]:
    """How many ranks this node should have: all of them if the rendezvous is at a loopback address."""
    local = process.environment.get("LOCAL_WORLD_SIZE", "")
    address = process.environment.get("MASTER_ADDR", "")
    if not local and (address in LOOPBACK or address.startswith("127.")):
        local = size
    return int(local) if local.isdigit() else None


def _described(rank: Rank, family: Family) -> Dict[str, Any]:
    process = rank.process
    return {
        "rank": rank.rank, "rank_from": rank.source, "pid": process.pid, "start": process.start,
        "has_nccl": any("nccl" in path or "rccl" in path for path in process.libraries),
        "environment": process.environment,
        "children": [{"pid": child.pid, "start": child.start, "name": child.name,
                      "command": " ".join(child.arguments)[:200]}
                     for child in family.below(process.pid)],
    }  # fmt: skip


def single(process: Process, family: Family) -> Dict[str, Any]:
    """A job of one process without a rank, which `--pid` named."""
    return _job([Rank(process, None, "")], family)
