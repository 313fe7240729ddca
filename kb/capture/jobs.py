"""Groups the jobs that nodes list into jobs over several nodes, by address, run id, Slurm job, or else command."""

from __future__ import annotations

import ipaddress
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kb.capture.gather import Listing
from kb.capture.plan import describe, no_choice
from kb.errors import UsageError
from kb.harness.collective import name_ranks


@dataclass(frozen=True, slots=True)
class Part:
    """The ranks of a job on one node; `job` is as the agent lists it."""

    listing: Listing
    job: Mapping[str, Any]

    @property
    def ranks(self) -> list[int]:
        return [rank["rank"] for rank in self.job["ranks"] if rank["rank"] is not None]


@dataclass(frozen=True, slots=True)
class Job:
    """A job on one or more nodes, the node with the lowest rank first. `name` is what `--job` takes."""

    name: str
    parts: tuple[Part, ...]

    @property
    def world_size(self) -> int | None:
        return next((part.job["world_size"] for part in self.parts if part.job["world_size"]), None)

    @property
    def slurm_job(self) -> str:
        return str(self.parts[0].job["slurm_job"])

    def __str__(self) -> str:
        ranks = [rank for part in self.parts for rank in part.job["ranks"]]
        nodes = "1 node" if len(self.parts) == 1 else f"{len(self.parts)} nodes"
        return describe({**self.parts[0].job, "ranks": ranks, "world_size": self.world_size}) + f", on {nodes}"

    def problems(self) -> Iterator[str]:
        """A sentence about ranks that occur twice."""
        counts = Counter(rank for part in self.parts for rank in part.ranks)
        if twice := [rank for rank, count in counts.items() if count > 1]:
            verb = "runs" if len(twice) == 1 else "run"
            yield f"{name_ranks(twice)} {verb} more than once: an earlier start of the job may be left over"


def group_over_nodes(listings: Sequence[Listing], slurm_job: str = "") -> list[Job]:
    """The jobs of the nodes that answered; with `slurm_job`, without those that belong to another Slurm job."""
    groups: dict[str, list[Part]] = {}
    for listing in listings:
        for job in listing.jobs:
            if not slurm_job or job["slurm_job"] in ("", slurm_job):
                _add(groups.setdefault(_name(job, listing), []), Part(listing, job))
    return [_job(name, parts) for name, parts in _joined(groups).items()]


def _add(parts: list[Part], part: Part) -> None:
    """Add a part; it is merged with another of its node, since one job may have several launchers on a node."""
    for number, other in enumerate(parts):
        if other.listing is part.listing and set(other.ranks).isdisjoint(part.ranks):
            ranks = [*other.job["ranks"], *part.job["ranks"]]
            parts[number] = Part(part.listing, {**other.job, "ranks": ranks, "launcher": None, "local_size": None})
            return
    parts.append(part)


def choose(jobs: Sequence[Job], name: str | None) -> Job | None:
    """The only job, or the one with this name; None if no job runs. Raises `UsageError` if it is ambiguous."""
    if name is not None:
        chosen = [job for job in jobs if name in (job.name, job.slurm_job)]
        if len(chosen) != 1:
            raise UsageError(f"{len(chosen)} jobs are called {name!r}", _choices(jobs))
        return chosen[0]
    if len(jobs) > 1:
        raise UsageError(f"{len(jobs)} training jobs run on these nodes", _choices(jobs))
    return jobs[0] if jobs else None


def _choices(jobs: Iterable[Job]) -> str:
    return no_choice((f"--job {job.name}", str(job)) for job in jobs)


def _name(job: Mapping[str, Any], listing: Listing) -> str:
    """The name of a job, equal on all its nodes. A job with a loopback address is on one node only."""
    environment = job["ranks"][0]["environment"]
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    address = job["address"]
    where = f"{listing.connection.name}/" if is_loopback(address) else ""
    own = address or (run_id if run_id != "none" else "") or ("" if job["slurm_job"] else job["command"])
    return where + "/".join(filter(None, (job["slurm_job"], own)))


def _joined(groups: Mapping[str, list[Part]]) -> dict[str, list[Part]]:
    """Join parts at `localhost` with the rest of their job: some launchers give only the first node that address."""
    joined = dict(groups)
    for name, parts in groups.items():
        size = parts[0].job["world_size"]
        if not is_loopback(parts[0].job["address"]) or not size or size <= len(parts[0].ranks):
            continue
        alike = [other for other, them in joined.items() if other != name and _fit(parts, them)]
        if len(alike) == 1:
            joined[alike[0]] = [*joined[alike[0]], *joined.pop(name)]
    return joined


def _fit(parts: Sequence[Part], others: Sequence[Part]) -> bool:
    first, second = parts[0].job, others[0].job
    same = ("world_size", "slurm_job")
    ports = {job["address"].rpartition(":")[2] for job in (first, second)}
    ranks = {rank for part in parts for rank in part.ranks}
    apart = ranks.isdisjoint(rank for part in others for rank in part.ranks)
    return len(ports) == 1 and apart and all(first[key] == second[key] for key in same)


def is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0] or address
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def _job(name: str, parts: Sequence[Part]) -> Job:
    """A job over nodes. If ranks occur twice, those guessed from the order on a node are dropped."""
    counts = Counter(rank for part in parts for rank in part.ranks)
    if any(count > 1 for count in counts.values()):
        parts = [
            Part(part.listing, {**part.job, "ranks": list(map(_without_guess, part.job["ranks"]))}) for part in parts
        ]
    return Job(name, tuple(sorted(parts, key=lambda part: min(part.ranks, default=1 << 30))))


def _without_guess(rank: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**rank, "rank": None, "rank_from": ""} if " " in rank["rank_from"] else rank
