"""Compares the flight records of the ranks: which rank never issued which collective, and which ranks disagree.

The input is a list of collectives per rank, as `kb.runtime.evidence` takes them from torch's flight recorder: `group`,
`seq` (per group, counting from 1), `op`, `sizes`, `dtypes`, `retired`. A dump of a job may add `outputs` (sizes),
`state` (scheduled, started, completed), `p2p`, `record_id` (counted by the rank over all groups; above 0 in its first
record when the ring buffer has overwritten earlier ones), `frames` (of user code, innermost first), `time_created_ns`
and `timeout_ms`.

Sizes are not compared where they may rightly differ between ranks: all_to_all, gather, scatter, the uneven `_v` forms,
and the outputs of reduce, which only one rank has. Dtypes are not compared for gather, scatter and broadcast, for which
torch records whatever the rank passed. torch's own analyzer makes about the same exceptions
(`torch/distributed/flight_recorder/components/types.py`). Point-to-point calls are ignored: they do not concern other
ranks.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest

from kb.harness.collective import Record, call_site, created_at, describe, has_completed, name_ranks, operation
from kb.harness.process_group import Group, Records, group_records

OWN_SIZES = ("all_to_all", "alltoall", "gather", "scatter", "all_gather_v", "reduce_scatter_v")
OWN_OUTPUTS = ("reduce", "_reduce_oop")
OWN_DTYPES = ("gather", "scatter", "broadcast", "_broadcast_oop")
ROOTED = (*OWN_DTYPES, *OWN_OUTPUTS)  # often written on only one side of an `if rank == 0`
MOST_SIDES = 8  # groups of ranks in one sentence


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A sentence, the ranks it accuses (none if unknown), and its time in seconds since the epoch."""

    text: str
    ranks: tuple[int, ...] = ()
    time: float | None = None


def compare(records: Records, world_size: int) -> tuple[str, ...]:
    """Sentences about the first collective the ranks disagree on; empty if they agree or fewer than two reported."""
    if len(records) < 2:
        return ()
    silent = [rank for rank in range(world_size) if rank not in records]
    return (*(mismatch.text for mismatch in find_mismatches(records)), *no_record(silent))


def no_record(silent: Collection[int]) -> tuple[str, ...]:
    """The sentence about ranks that left no record."""
    return (f"no flight record from {name_ranks(silent)}",) if silent else ()


def find_mismatches(
    records: Records,
    members: Mapping[str, Collection[int]] | None = None,
    issued: Mapping[tuple[int, str], int] | None = None,
) -> list[Mismatch]:
    """The first disputed or unfinished collective of each group; the group that explains the others comes first.

    `members` are the ranks of a group, if a dump names them. `issued` is the last sequence number that a rank issued in
    a group, for groups of which the rank has no record.
    """
    groups = group_records(records, members or {}, issued or {})
    waiting = Counter(rank for group in groups for rank in group.waiting)
    by_group = [
        (group, mismatches) for group in groups if len(group.members) > 1 and (mismatches := _mismatches_of(group))
    ]
    by_group.sort(key=lambda pair: (_is_cascade(pair[1][0], pair[0].waiting, waiting), pair[1][0].time or 0.0))
    return [mismatch for _, mismatches in by_group for mismatch in mismatches] + _never_completed(groups)


def _mismatches_of(group: Group) -> list[Mismatch]:
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


def _late(seq: int, group: Group, by_rank: dict[int, Record]) -> Mismatch | None:
    """The mismatch if the last rank came after the first had waited for its timeout, by the clocks of both ranks."""
    times = {rank: at for rank, entry in by_rank.items() if (at := created_at(entry))}
    if len(times) < len(by_rank):
        return None
    first, last = min(times, key=times.__getitem__), max(times, key=times.__getitem__)
    behind, timeout = times[last] - times[first], by_rank[first].get("timeout_ms", 0) / 1000
    if not 0 < timeout < behind:
        return None
    what = f"collective {seq} ({describe(by_rank[last])}){group.suffix}"
    text = f"rank {last} came to {what} {behind:.1f} s after rank {first}, which waits for {timeout:.1f} s"
    return Mismatch(text + call_site(by_rank[last]), (last,), times[first])


def _is_behind(rank: int, group: Group, by_rank: dict[int, Record]) -> bool:
    """Whether the others, which do not wait for each call to end, made this call before the rank made its last one.

    If so, the rank stopped in that last call, which the others have not finished either. NCCL records states that show
    this; gloo does not.
    """
    last = group.calls.get(group.last[rank], {}).get(rank)
    if last is None or not _is_gloo(last):
        return False
    at = created_at(last) or 0.0
    return all(0 < (created_at(call) or 0.0) < at for call in by_rank.values())


def _is_gloo(call: Record) -> bool:
    return str(call["op"]).startswith("gloo:")


def _missing(seq: int, group: Group, by_rank: dict[int, Record], missing: list[int]) -> Mismatch:
    waiting = [rank for rank, entry in by_rank.items() if entry.get("state") != "completed"]
    rank, verb = (waiting[0], "is in") if waiting else (min(by_rank), "has finished")
    call = by_rank[rank]
    what = f"collective {seq} ({describe(call)}){group.suffix}"
    text = f"{name_ranks(missing)} never issued {what}, which rank {rank} {verb}{call_site(call)}"
    return Mismatch(text, tuple(missing), created_at(call))


def _disputed(seq: int, group: Group, by_rank: dict[int, Record]) -> Mismatch:
    sides = _sides({rank: describe(entry) for rank, entry in by_rank.items()})
    versions = "; ".join(
        f"{name_ranks(ranks)} {kind}{call_site(by_rank[ranks[0]])}" for kind, ranks in sides[:MOST_SIDES]
    )
    has_majority = len(sides) > 1 and len(sides[0][1]) > len(sides[1][1])
    accused = sorted(rank for _, ranks in sides[1:] for rank in ranks) if has_majority else []
    return Mismatch(f"collective {seq}{group.suffix} differs: {versions}", tuple(accused), _earliest(by_rank.values()))


def _sides(kinds: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """Ranks grouped by what they did, largest group first."""
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, kind in kinds.items():
        sides[kind].append(rank)
    return sorted(sides.items(), key=lambda side: -len(side[1]))


def _all_inside(seq: int, group: Group, by_rank: dict[int, Record]) -> Mismatch:
    call = next(iter(by_rank.values()))
    what = f"collective {seq} ({describe(call)}){group.suffix}"
    on = ", on gloo" if _is_gloo(call) else ""
    text = f"all ranks are in {what} with the same sizes, none has completed it{on}{call_site(call)}"
    return Mismatch(text, (), _earliest(by_rank.values()))


def _call_sites(end: int, group: Group) -> list[Mismatch]:
    """The first collective before the disputed one that the ranks called from different lines."""
    for seq in sorted(call for call in group.calls if call < end):
        by_rank = group.calls[seq]
        stacks = {rank: entry.get("frames", [])[::-1] for rank, entry in sorted(by_rank.items())}
        entry = next(iter(by_rank.values()))
        fork = _fork(stacks.values())
        if fork is not None and all(stacks.values()) and operation(entry) not in ROOTED:
            sides = _sides({rank: stack[min(fork, len(stack) - 1)] for rank, stack in stacks.items()})
            origins = "; ".join(f"{name_ranks(ranks)} from {where}" for where, ranks in sides[:MOST_SIDES])
            what = f"collective {seq} ({describe(entry)}){group.suffix}"
            return [Mismatch(f"{what} was called from different lines: {origins}", (), created_at(entry))]
    return []


def _fork(stacks: Iterable[list[str]]) -> int | None:
    """The outermost level at which stacks differ."""
    levels = enumerate(zip_longest(*stacks))
    return next((depth for depth, frames in levels if len(set(frames)) > 1), None)


def _never_completed(groups: list[Group]) -> list[Mismatch]:
    """The mismatch if the records begin with the job and every group's ranks are all in its first collective."""
    stuck = [group for group in groups if len(group.members) > 1]
    entries = [entry for group in stuck for by_rank in group.calls.values() for entry in by_rank.values()]
    is_start = all(set(group.members) == set(group.calls.get(1, {})) for group in stuck)
    if not entries or not is_start or any(map(has_completed, entries)):
        return []
    first = min(entries, key=lambda entry: (created_at(entry) or 0.0, int(entry["seq"])))
    return [
        Mismatch(
            f"no collective ever completed, the first was {describe(first)}{call_site(first)}", (), created_at(first)
        )
    ]


def _is_cascade(mismatch: Mismatch, own: Collection[int], places: Mapping[int, int]) -> bool:
    """Whether the accused ranks could not come because each waits in a collective of another group.

    `own` are the ranks that wait in the mismatch's group; `places` is the number of groups in which each rank waits.
    """
    return bool(mismatch.ranks) and all(places[rank] > (rank in own) for rank in mismatch.ranks)


def _is_disputed(entries: list[Record]) -> bool:
    op = operation(entries[0])
    if any(operation(entry) != op for entry in entries):
        return True
    compared = [] if op in OWN_DTYPES else ["dtypes"]
    if not op.startswith(OWN_SIZES):
        compared += ["sizes"] if op in OWN_OUTPUTS else ["sizes", "outputs"]
    # a rank that passed nothing, or whose record lacks the field, agrees with every other rank
    return any(len({str(entry[name]) for entry in entries if entry.get(name)}) > 1 for name in compared)


def _earliest(entries: Iterable[Record]) -> float | None:
    return min(filter(None, map(created_at, entries)), default=None)
