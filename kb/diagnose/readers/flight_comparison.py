"""Compares the flight-recorder dumps of the ranks of a job: one sentence for each disagreement."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from kb.diagnose.evidence import Line
from kb.diagnose.readers.flight_recorder import FlightDump
from kb.harness import flight_compare
from kb.harness.collective import name_ranks


def compare_dumps(dumps: Iterable[FlightDump]) -> list[Line]:
    """The sentences about the dumps; the one that explains the others comes first."""
    latest = _with_unique_groups(_interned(_latest(dumps)))
    if len(latest) < 2:
        return []
    records = {rank: dump.records for rank, dump in latest.items()}
    members = {group: ranks for dump in latest.values() for group, ranks in dump.members.items()}
    issued = {(rank, group): seq for rank, dump in latest.items() for group, seq in _enqueued(dump)}
    lines = [_line(mismatch, latest) for mismatch in flight_compare.find_mismatches(records, members, issued)]
    silent = frozenset[int]().union(*set(members.values())) - set(latest)
    source = latest[min(latest)].source
    return lines + [Line(source, 0, sentence, min(silent)) for sentence in flight_compare.no_record(silent)]


def _latest(dumps: Iterable[FlightDump]) -> dict[int, FlightDump]:
    """The latest dump of each rank; among equally late dumps, one with call sites."""
    latest: dict[int, FlightDump] = {}
    for dump in sorted(dumps, key=_lateness):
        if dump.rank is not None:
            latest[dump.rank] = dump
    return dict(sorted(latest.items()))


def _lateness(dump: FlightDump) -> tuple[int, bool]:
    last = max((record["time_created_ns"] for record in dump.records), default=0)
    return last, any(record["frames"] for record in dump.records)


def _interned(dumps: dict[int, FlightDump]) -> dict[int, FlightDump]:
    """Replace equal sets of ranks by one object, since a thousand groups may have the same large set."""
    by_value: dict[frozenset[int], frozenset[int]] = {}
    by_identity: dict[int, frozenset[int]] = {}
    for dump in dumps.values():
        for ranks in dump.members.values():
            if id(ranks) not in by_identity:
                by_identity[id(ranks)] = by_value.setdefault(ranks, ranks)
    return {
        rank: replace(dump, members={group: by_identity[id(ranks)] for group, ranks in dump.members.items()})
        for rank, dump in dumps.items()
    }


def _with_unique_groups(dumps: dict[int, FlightDump]) -> dict[int, FlightDump]:
    """Add the ranks to the names of groups that `split_group` gave the same name."""
    listed: dict[str, set[frozenset[int]]] = defaultdict(set)
    for dump in dumps.values():
        for group, ranks in dump.members.items():
            listed[group].add(ranks)
    ambiguous = {group for group in listed if len(listed[group]) > 1}
    return {rank: _renamed(dump, ambiguous) for rank, dump in dumps.items()}


def _renamed(dump: FlightDump, ambiguous: set[str]) -> FlightDump:
    names = {group: f"{group} ({name_ranks(dump.members[group])})" for group in ambiguous & set(dump.members)}
    if not names:
        return dump
    records = [{**record, "group": names.get(record["group"], record["group"])} for record in dump.records]
    members = {names.get(group, group): ranks for group, ranks in dump.members.items()}
    return replace(dump, records=records, members=members)


def _enqueued(dump: FlightDump) -> Iterator[tuple[str, int]]:
    for group, status in dump.status.items():
        if status.enqueued is not None:
            yield group, status.enqueued


def _line(mismatch: flight_compare.Mismatch, dumps: Mapping[int, FlightDump]) -> Line:
    """The line of a mismatch. It cites the dump of the rank that the mismatch is about, else the first dump."""
    rank = mismatch.ranks[0] if mismatch.ranks else None
    return Line(dumps[min(dumps) if rank is None else rank].source, 0, mismatch.text, rank, mismatch.time)
