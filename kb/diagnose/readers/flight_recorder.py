"""Reads dumps of torch's flight recorder, as ProcessGroupNCCL and `_dump_fr_trace` write them, for
`kb.harness.flight_compare`.

The format is that of `torch/csrc/distributed/c10d/FlightRecorder.hpp`, versions 2.0 to 2.10, pickle or JSON. A dump
says neither whose it is (the file's name does, `nccl_trace_rank_3`) nor, in JSON, where its collectives were called.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar

from kb.diagnose.evidence import Line
from kb.diagnose.inputs.rank_from_path import rank_from_path
from kb.diagnose.readers.safe_unpickler import Unreadable, as_integer, as_text, load
from kb.harness import flight_compare
from kb.harness.collective import Record, name_ranks

KEYS = ("entries", "pg_config", "pg_status")
STATES = ("scheduled", "started", "completed")
STAGES = ("enqueued", "started", "completed")
MOST_RECORDS = 50_000
MOST_RANKS, LONGEST_RANKS = 1 << 17, 1 << 20  # of a group: ranks, and characters where they are a text
MOST_FRAMES = 200
MOST_TENSORS = 64
TORCH = re.compile(r"(^|[/\\])torch[/\\](distributed|nn|autograd|utils|optim|cuda|fx|_dynamo|_inductor)[/\\]")
LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<frozen ")

Found = TypeVar("Found")
Made = dict[tuple[Callable[[Any], Any], int], Any]  # by what made it and the identity of what it was made of


@dataclass(frozen=True, slots=True)
class Status:
    """Sequence numbers of a group: the last that was enqueued, started, completed; None where it is not recorded."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(frozen=True, slots=True)
class FlightDump:
    """What one rank recorded. Groups are `name:description`; `members` has those whose ranks the dump lists."""

    source: str
    rank: int | None
    version: str
    records: list[Record]
    members: dict[str, frozenset[int]]
    status: dict[str, Status]


def read_dump(data: bytes, source: str) -> FlightDump:
    """Raises `Unreadable`."""
    dump = load(data)
    if not isinstance(dump, dict) or not any(key in dump for key in KEYS):
        raise Unreadable("it is no flight-recorder dump: it has neither entries nor process groups")
    entries = dump.get("entries") or []  # JSON leaves the key out when there are none
    if not isinstance(entries, list):
        raise Unreadable("its entries are not a list")
    made: Made = {}
    records = [_record(index, entry, made) for index, entry in enumerate(entries[-MOST_RECORDS:])]
    rank = as_integer(dump.get("rank"))
    return FlightDump(
        source,
        rank if rank is not None and rank >= 0 else _rank_of(source),
        as_text(dump.get("version")),
        records,
        _members(dump.get("pg_config"), made),
        _statuses(dump.get("pg_status"), records),
    )


def _rank_of(source: str) -> int | None:
    """By the name of the file, which ends in the rank for torch's own analyzer; an extension may follow."""
    stem = re.sub(r"(\.[A-Za-z]{1,8}){0,3}$", "", _base_name(source)[-200:])
    ending = re.search(r"[0-9]{1,6}$", stem)
    named = rank_from_path(source)
    return int(ending[0]) if named is None and ending else named


def compare_dumps(dumps: Iterable[FlightDump]) -> list[Line]:
    """What the dumps of a job say together, the sentence that explains the others first."""
    latest = _told_apart(_interned(_latest(dumps)))
    if len(latest) < 2:
        return []
    records = {rank: dump.records for rank, dump in latest.items()}
    members = {group: ranks for dump in latest.values() for group, ranks in dump.members.items()}
    issued = {(rank, group): seq for rank, dump in latest.items() for group, seq in _enqueued(dump)}
    found = [_line(finding, latest) for finding in flight_compare.find_mismatches(records, members, issued)]
    silent = frozenset[int]().union(*set(members.values())) - set(latest)
    source = latest[min(latest)].source
    return found + [Line(source, 0, said, min(silent)) for said in flight_compare.no_record(silent)]


def _latest(dumps: Iterable[FlightDump]) -> dict[int, FlightDump]:
    """One dump per rank, the latest; of equally late ones that which has stacks."""
    found: dict[int, FlightDump] = {}
    for dump in sorted(dumps, key=_lateness):
        if dump.rank is not None:
            found[dump.rank] = dump
    return dict(sorted(found.items()))


def _interned(dumps: dict[int, FlightDump]) -> dict[int, FlightDump]:
    """With equal sets of ranks as one object: a thousand groups may name them, and to compare two is to look at all."""
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


def _told_apart(dumps: dict[int, FlightDump]) -> dict[int, FlightDump]:
    """Groups that `split_group` gave one name get the name of their ranks as well."""
    listed: dict[str, set[frozenset[int]]] = defaultdict(set)
    for dump in dumps.values():
        for group, ranks in dump.members.items():
            listed[group].add(ranks)
    return {rank: _renamed(dump, {group for group in listed if len(listed[group]) > 1}) for rank, dump in dumps.items()}


def _renamed(dump: FlightDump, ambiguous: set[str]) -> FlightDump:
    names = {group: f"{group} ({name_ranks(dump.members[group])})" for group in ambiguous & set(dump.members)}
    records = (
        [{**record, "group": names.get(record["group"], record["group"])} for record in dump.records]
        if names
        else dump.records
    )
    members = {names.get(group, group): ranks for group, ranks in dump.members.items()}
    return replace(dump, records=records, members=members)


def _enqueued(dump: FlightDump) -> Iterator[tuple[str, int]]:
    for group, status in dump.status.items():
        if status.enqueued is not None:
            yield group, status.enqueued


def _lateness(dump: FlightDump) -> tuple[int, bool]:
    return max((record["time_created_ns"] for record in dump.records), default=0), any(
        record["frames"] for record in dump.records
    )


def _line(finding: flight_compare.Mismatch, dumps: Mapping[int, FlightDump]) -> Line:
    """Cited from the dump of the rank that is accused, or of the first."""
    rank = finding.ranks[0] if finding.ranks else None
    return Line(dumps[min(dumps) if rank is None else rank].source, 0, finding.text, rank, finding.time)


def _once(make: Callable[[Any], Found], value: Any, made: Made) -> Found:
    """What is made of a part of the dump: once, as a pickle may name one part in fifty thousand places."""
    key = (make, id(value))
    if key not in made:
        made[key] = make(value)
    found: Found = made[key]
    return found


def _record(index: int, entry: Any, made: Made) -> Record:
    seq = as_integer(entry.get("collective_seq_id", entry.get("seq_id"))) if isinstance(entry, dict) else None
    if seq is None:
        raise Unreadable(f"its entry {index} has no sequence number")
    op = as_text(entry.get("profiling_name"))
    state = as_text(entry.get("state"))
    return {
        "group": _group(entry),
        "seq": seq,
        "op": op,
        "sizes": _once(_sizes, entry.get("input_sizes"), made),
        "outputs": _once(_sizes, entry.get("output_sizes"), made),
        "dtypes": _once(_dtypes, entry.get("input_dtypes"), made),
        "retired": entry.get("retired") is True,
        "state": state if state in STATES else "scheduled",
        "p2p": entry.get("is_p2p") is True or bool(re.search(r"(^|:)(send|recv)\b", op)),
        "frames": _once(_user_frames, entry.get("frames"), made),
        "record_id": as_integer(entry.get("record_id")) or 0,
        "time_created_ns": as_integer(entry.get("time_created_ns")) or 0,
        "timeout_ms": as_integer(entry.get("timeout_ms")) or 0,
        "pg_id": as_integer(entry.get("pg_id")),
    }


def _group(entry: dict[Any, Any]) -> str:
    name = entry.get("process_group")
    parts = [as_text(part) for part in _list(name, 2)] if isinstance(name, (list, tuple)) else [as_text(name)]
    named = ":".join(part for part in parts if part not in ("", "undefined"))
    return named or str(as_integer(entry.get("pg_id")) or 0)


def _list(value: Any, most: int) -> list[Any]:
    return list(value[:most]) if isinstance(value, (list, tuple)) else []


def _sizes(value: Any) -> list[list[int]]:
    return [[as_integer(size) or 0 for size in _list(one, 16)] for one in _list(value, MOST_TENSORS)]


def _dtypes(value: Any) -> list[str]:
    return [as_text(one, 40) for one in _list(value, MOST_TENSORS)]


def _user_frames(value: Any) -> list[str]:
    """`train.py:42 step`, innermost first: not of libraries; of other libraries than torch if that is all."""
    frames = [one for one in _list(value, MOST_FRAMES) if isinstance(one, dict)]
    places = [
        _place(as_text(frame.get("filename"), 500), as_integer(frame.get("line")), as_text(frame.get("name"), 80))
        for frame in frames
    ]
    own = [place for place, library in places if not library]
    return own or [place for place, library in places if library != "torch"]


@lru_cache(4096)
def _place(file: str, line: int | None, name: str) -> tuple[str, str]:
    library = "torch" if TORCH.search(file) else "other" if LIBRARY.search(file) else ""
    return f"{_base_name(file)}:{line} {name}", library


def _base_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _members(config: Any, made: Made) -> dict[str, frozenset[int]]:
    """Ranks by group where the dump names them; gloo files all its groups under one empty name, often without ranks."""
    listed = {}
    for name, one in list(config.items())[:MOST_RECORDS] if isinstance(config, dict) else ():
        ranks = _once(_ranks, one.get("ranks"), made) if isinstance(one, dict) else frozenset()
        if ranks and as_text(name):
            listed[_group({"process_group": [name, one.get("desc")]})] = ranks
    return listed


def _ranks(value: Any) -> frozenset[int]:
    """`[0, 1]`, as a list or, as torch writes it, as text."""
    found = re.findall(r"\d{1,9}", value[:LONGEST_RANKS]) if isinstance(value, str) else _list(value, MOST_RANKS)
    return frozenset(rank for one in found if (rank := as_integer(one)) is not None)


def _statuses(status: Any, records: list[Record]) -> dict[str, Status]:
    """By group. torch files them under a number that each rank counts for itself and that its records translate."""
    groups = {0: "0:default_pg", **{record["pg_id"]: record["group"] for record in records}}
    found = {}
    for key, one in list(status.items())[:MOST_RECORDS] if isinstance(status, dict) else ():
        group = groups.get(as_integer(key))
        if group and isinstance(one, dict):
            found[group] = Status(*(as_integer(one.get(f"last_{what}_collective")) for what in STAGES))
    return found
