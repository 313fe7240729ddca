"""Compares the flight records of the ranks: which rank never came to which collective, and who disagreed.

Input is per rank a list of collectives as `kb.runtime.worker` takes them out of torch's flight recorder: `group`,
`seq` (per group, counting from 1), `op`, `sizes`, `dtypes`, `retired`. A dump of a job adds, all of it optional:
`outputs` (sizes), `state` (scheduled, started, completed), `p2p`, `record_id` (counted by the rank over all groups; above 0 in
its first record when the ring buffer has overwritten what was before), `frames` (the user's, innermost first),
`time_created_ns` and `timeout_ms`.

Sizes are not compared where each rank rightly has its own: all_to_all, gather, scatter and the uneven `_v` forms; of
reduce the outputs, which one rank has. Dtypes are not compared for gather, scatter and broadcast, of which torch
records what the rank happened to pass. torch's own analyzer makes about the same exceptions
(`torch/distributed/flight_recorder/components/types.py`). Point-to-point calls are no business of the other ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

from kb.harness.collective import Record, created, describe, has_completed, name_ranks, operation, place

Records = dict[int, list[Record]]
Calls = dict[int, dict[int, Record]]  # of one group: by sequence number, by rank

OWN_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "all_gather_v", "reduce_scatter_v")
OWN_OUTPUTS = ("reduce", "_reduce_oop")
OWN_DTYPES = ("gather", "scatter", "broadcast", "_broadcast_oop")
ROOTED = (*OWN_DTYPES, *OWN_OUTPUTS)  # commonly written on either side of an `if rank == 0`
MOST_SIDES = 8  # groups of ranks in one sentence


@dataclass(frozen=True, slots=True)
class Finding:
    """A sentence, the ranks it accuses (none where nothing tells who is wrong), and when that was, since the epoch."""

    text: str
    ranks: tuple[int, ...] = ()
    time: float | None = None


@dataclass(frozen=True, slots=True)
class Group:
    """Collectives of one process group, and the last number that each member issued, where that is known."""

    name: str
    calls: Calls
    members: list[int]
    last: dict[int, int] = field(default_factory=dict)

    @property
    def named(self) -> str:
        return "" if "default_pg" in self.name or self.name in ("", "0") else f" of group {self.name}"


def compare(records: Records, world_size: int) -> tuple[str, ...]:
    """Sentences about the first collective the ranks disagree on; empty when they agree or too few reported."""
    if len(records) < 2:
        return ()
    silent = [rank for rank in range(world_size) if rank not in records]
    return (*(finding.text for finding in findings(records)), *no_record(silent))


def no_record(silent: Collection[int]) -> tuple[str, ...]:
    """The sentence about ranks of which there is no record."""
    return (f"no flight record from {name_ranks(silent)}",) if silent else ()


def findings(
    records: Records,
    members: Mapping[str, Collection[int]] | None = None,
    issued: Mapping[tuple[int, str], int] | None = None,
) -> list[Finding]:
    """Per group its first disputed or unfinished collective; the group that explains the others comes first.

    `members` are the ranks of a group where a dump says so. `issued` is, per rank and group, the last sequence number
    that the rank issued, for groups of which it has no record.
    """
    groups = _groups(records, members or {}, issued or {})
    told = [(group, said) for group in groups if len(group.members) > 1 and (said := _of(group))]
    waiting = {
        group.name: {rank for rank, seq in group.last.items() if _is_waiting(rank, seq, group)} for group in groups
    }
    places = Counter(rank for ranks in waiting.values() for rank in ranks)
    told.sort(key=lambda one: (_is_cascade(one[1][0], waiting[one[0].name], places), one[1][0].time or 0.0))
    return [finding for _, said in told for finding in said] + _never_completed(groups)


def _groups(
    records: Records, members: Mapping[str, Collection[int]], issued: Mapping[tuple[int, str], int]
) -> list[Group]:
    by_group: dict[str, Calls] = defaultdict(lambda: defaultdict(dict))
    for rank, entries in records.items():
        for entry in entries:
            if not entry.get("p2p") and operation(entry) != "coalesced":  # of several under one number the first counts
                by_group[str(entry["group"])][int(entry["seq"])].setdefault(rank, entry)
    is_only = len(by_group) == 1
    found = []
    for name, calls in by_group.items():
        seen = {rank for by_rank in calls.values() for rank in by_rank}
        of_all = set(records) if is_only or "default_pg" in name else seen
        among = members.get(name, of_all)
        ranks = [rank for rank in sorted(records) if rank in among]
        found.append(Group(name, calls, ranks, _last_issued(name, calls, ranks, records, issued)))
    return found


def _last_issued(
    name: str, calls: Calls, ranks: list[int], records: Records, issued: Mapping[tuple[int, str], int]
) -> dict[int, int]:
    """No number for a rank whose records of the group may all be overwritten: it is accused of nothing."""
    last = {rank: seq for seq in sorted(calls) for rank in calls[seq]}
    for rank in [rank for rank in ranks if rank not in last]:
        if (rank, name) in issued:
            last[rank] = issued[rank, name]
        elif not (records[rank] and records[rank][0].get("record_id")):
            last[rank] = 0
    return last


def _of(group: Group) -> list[Finding]:
    for seq in sorted(group.calls):
        by_rank = dict(sorted(group.calls[seq].items()))
        missing = [rank for rank in group.members if rank not in by_rank and group.last.get(rank, seq) < seq]
        if missing and all(_is_behind(rank, group, by_rank) for rank in missing):
            return [_all_inside(seq - 1, group, group.calls[seq - 1])]
        if missing:
            return [_missing(seq, group, by_rank, missing), *_call_sites(seq, group)]
        if _is_disputed(list(by_rank.values())):
            return [_disputed(seq, group, by_rank), *_call_sites(seq, group)]
        if len(by_rank) == len(group.members) and (late := _late(seq, group, by_rank)):
            return [late]
        if len(by_rank) == len(group.members) and not any(map(has_completed, by_rank.values())):
            return [_all_inside(seq, group, by_rank)]
    return []


def _late(seq: int, group: Group, by_rank: dict[int, Record]) -> Finding | None:
    """Said when the last rank came when the first had waited for longer than its timeout, by the clocks of both."""
    times = {rank: at for rank, entry in by_rank.items() if (at := created(entry))}
    if len(times) < len(by_rank):
        return None
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    behind, timeout = times[last] - times[first], by_rank[first].get("timeout_ms", 0) / 1000
    if not 0 < timeout < behind:
        return None
    what = f"collective {seq} ({describe(by_rank[last])}){group.named}"
    text = f"rank {last} came to {what} {behind:.1f} s after rank {first}, which waits for {timeout:.1f} s"
    return Finding(text + place(by_rank[last]), (last,), times[first])


def _is_behind(rank: int, group: Group, by_rank: dict[int, Record]) -> bool:
    """Whether the others, who do not wait for each call, made this one before the rank made its last.

    Then it stopped in that one, which they have not finished either. NCCL's states would say so; gloo has none.
    """
    last = group.calls.get(group.last[rank], {}).get(rank)
    if last is None or not _is_gloo(last):
        return False
    at = created(last) or 0.0
    return all(0 < (created(call) or 0.0) < at for call in by_rank.values())


def _is_gloo(call: Record) -> bool:
    return str(call["op"]).startswith("gloo:")


def _missing(seq: int, group: Group, by_rank: dict[int, Record], missing: list[int]) -> Finding:
    waiting = [rank for rank, entry in by_rank.items() if entry.get("state") != "completed"]
    rank, verb = (waiting[0], "is in") if waiting else (min(by_rank), "has finished")
    call = by_rank[rank]
    what = f"collective {seq} ({describe(call)}){group.named}"
    text = f"{name_ranks(missing)} never issued {what}, which rank {rank} {verb}{place(call)}"
    return Finding(text, tuple(missing), created(call))


def _disputed(seq: int, group: Group, by_rank: dict[int, Record]) -> Finding:
    sides = _sides({rank: describe(entry) for rank, entry in by_rank.items()})
    told = "; ".join(f"{name_ranks(ranks)} {kind}{place(by_rank[ranks[0]])}" for kind, ranks in sides[:MOST_SIDES])
    has_majority = len(sides) > 1 and len(sides[0][1]) > len(sides[1][1])
    accused = sorted(rank for _, ranks in sides[1:] for rank in ranks) if has_majority else []
    return Finding(f"collective {seq}{group.named} differs: {told}", tuple(accused), _earliest(by_rank.values()))


def _sides(kinds: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks by what they did, the majority first."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        sides[kind].append(rank)
    return sorted(sides.items(), key=lambda side: -len(side[1]))


def _all_inside(seq: int, group: Group, by_rank: dict[int, Record]) -> Finding:
    call = next(iter(by_rank.values()))
    what = f"collective {seq} ({describe(call)}){group.named}"
    on = ", on gloo" if _is_gloo(call) else ""
    text = f"all ranks are in {what} with the same sizes, none has completed it{on}{place(call)}"
    return Finding(text, (), _earliest(by_rank.values()))


def _call_sites(end: int, group: Group) -> list[Finding]:
    """The first collective before the disputed one that the ranks called from different lines."""
    for seq in sorted(call for call in group.calls if call < end):
        by_rank = group.calls[seq]
        stacks = {rank: entry.get("frames", [])[::-1] for rank, entry in sorted(by_rank.items())}
        entry = next(iter(by_rank.values()))
        fork = _fork(stacks.values())
        if fork is not None and all(stacks.values()) and operation(entry) not in ROOTED:
            sides = _sides({rank: stack[min(fork, len(stack) - 1)] for rank, stack in stacks.items()})
            told = "; ".join(f"{name_ranks(ranks)} from {where}" for where, ranks in sides[:MOST_SIDES])
            what = f"collective {seq} ({describe(entry)}){group.named}"
            return [Finding(f"{what} was called from different lines: {told}", (), created(entry))]
    return []


def _fork(stacks: Iterable[list[str]]) -> int | None:
    """The outermost level at which stacks differ."""
    levels = enumerate(zip_longest(*stacks))
    return next((depth for depth, frames in levels if len(set(frames)) > 1), None)


def _never_completed(groups: list[Group]) -> list[Finding]:
    """Said when the records begin at the beginning, and every group's ranks are all in its first collective."""
    stuck = [group for group in groups if len(group.members) > 1]
    entries = [entry for group in stuck for by_rank in group.calls.values() for entry in by_rank.values()]
    is_start = all(set(group.members) == set(group.calls.get(1, {})) for group in stuck)
    if not entries or not is_start or any(map(has_completed, entries)):
        return []
    first = min(entries, key=lambda entry: (created(entry) or 0.0, int(entry["seq"])))
    return [Finding(f"no collective ever completed, the first was {describe(first)}{place(first)}", (), created(first))]


def _is_cascade(finding: Finding, own: Collection[int], places: Mapping[int, int]) -> bool:
    """Whether the accused ranks could not come, because each waits in a collective of another group.

    `own` are the ranks that wait in the group of the finding, `places` in how many groups each rank waits.
    """
    return bool(finding.ranks) and all(places[rank] > (rank in own) for rank in finding.ranks)


def _is_waiting(rank: int, seq: int, group: Group) -> bool:
    entry = group.calls.get(seq, {}).get(rank)
    return entry is not None and not has_completed(entry)


def _is_disputed(entries: list[Record]) -> bool:
    op = operation(entries[0])
    if any(operation(entry) != op for entry in entries):
        return True
    compared = [] if op in OWN_DTYPES else ["dtypes"]
    if not op.startswith(OWN_SIZES):
        compared += ["sizes"] if op in OWN_OUTPUTS else ["sizes", "outputs"]
    # a rank that passed nothing, or of which it is not recorded, agrees with all
    return any(len({str(entry[name]) for entry in entries if entry.get(name)}) > 1 for name in compared)


def _earliest(entries: Iterable[Record]) -> float | None:
    return min(filter(None, map(created, entries)), default=None)
