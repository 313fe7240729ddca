"""Sorts flight records by process group: which ranks made which collective, and how far each rank came."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from kb.harness.collective import Record, has_completed, operation

Records = dict[int, list[Record]]  # by rank
Calls = dict[int, dict[int, Record]]  # in one group: by sequence number, then by rank


@dataclass(frozen=True, slots=True)
class Group:
    """The collectives of one process group, and the last number that each member issued, if known."""

    name: str
    calls: Calls
    members: list[int]
    last: dict[int, int] = field(default_factory=dict)

    @property
    def suffix(self) -> str:
        """The group's name for use in a sentence; "" for the default group."""
        return "" if "default_pg" in self.name or self.name in ("", "0") else f" of group {self.name}"

    @property
    def waiting(self) -> set[int]:
        """The ranks whose last collective has not completed."""
        last_calls = {rank: self.calls.get(seq, {}).get(rank) for rank, seq in self.last.items()}
        return {rank for rank, call in last_calls.items() if call is not None and not has_completed(call)}


def group_records(
    records: Records, members: Mapping[str, Collection[int]], issued: Mapping[tuple[int, str], int]
) -> list[Group]:
    """Every process group that a record names. `members` and `issued` are as in `flight_compare.find_mismatches`."""
    by_group: dict[str, Calls] = defaultdict(lambda: defaultdict(dict))
    for rank, entries in records.items():
        for entry in entries:
            if not entry.get("p2p") and operation(entry) != "coalesced":  # of calls with one number, the first counts
                by_group[str(entry["group"])][int(entry["seq"])].setdefault(rank, entry)
    groups = []
    for name, calls in by_group.items():
        is_default = len(by_group) == 1 or "default_pg" in name
        callers = {rank for by_rank in calls.values() for rank in by_rank}
        ranks = sorted(set(records).intersection(members.get(name, records if is_default else callers)))
        groups.append(Group(name, calls, ranks, _last_issued(name, calls, ranks, records, issued)))
    return groups


def _last_issued(
    name: str, calls: Calls, ranks: list[int], records: Records, issued: Mapping[tuple[int, str], int]
) -> dict[int, int]:
    """The last number that each rank issued.

    A rank whose records of the group may all have been overwritten gets none, so that it is not accused of anything.
    """
    last = {rank: seq for seq in sorted(calls) for rank in calls[seq]}
    for rank in [rank for rank in ranks if rank not in last]:
        if (rank, name) in issued:
            last[rank] = issued[rank, name]
        elif not (records[rank] and records[rank][0].get("record_id")):
            last[rank] = 0
    return last
