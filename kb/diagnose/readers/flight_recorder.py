"""Reads dumps of torch's flight recorder, as ProcessGroupNCCL and `_dump_fr_trace` write them.

The format is defined in `torch/csrc/distributed/c10d/FlightRecorder.hpp`, versions 2.0 to 2.10, as pickle or JSON. A
dump does not contain its rank (the file name does, `nccl_trace_rank_3`), and in JSON no call sites either.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

from kb.diagnose.inputs.rank_from_path import rank_from_path
from kb.diagnose.readers.safe_unpickler import load_pickle
from kb.diagnose.readers.structured import MOST_VALUES, Unreadable, as_integer, as_text, load_json
from kb.harness.collective import Record

KEYS = ("entries", "pg_config", "pg_status")
STATES = ("scheduled", "started", "completed")
STAGES = ("enqueued", "started", "completed")
MOST_RECORDS = 50_000
MOST_RANKS, LONGEST_RANKS = 1 << 17, 1 << 20  # of a group: ranks, and characters if they are text
MOST_FRAMES = 200
MOST_TENSORS = 64
MOST_SHARED = 100_000
TORCH = re.compile(r"(^|[/\\])torch[/\\](distributed|nn|autograd|utils|optim|cuda|fx|_dynamo|_inductor)[/\\]")
LIBRARY = re.compile(r"[/\\](site-packages|dist-packages|lib[/\\]python3\.\d+)[/\\]|^<frozen ")

Parsed = TypeVar("Parsed")


@dataclass(frozen=True, slots=True)
class GroupStatus:
    """The last enqueued, started and completed sequence numbers of a group; None if the dump has none."""

    enqueued: int | None
    started: int | None
    completed: int | None


@dataclass(frozen=True, slots=True)
class FlightDump:
    """The dump of one rank. Groups are `name:description`; `members` has only groups whose ranks the dump lists.

    `records` have the form that `kb.harness.flight_compare` expects.
    """

    source: str
    rank: int | None
    version: str
    records: list[Record]
    members: dict[str, frozenset[int]]
    status: dict[str, GroupStatus]


class SharedParts:
    """Stores equal parts of many dumps once, since a thousand ranks list the same groups and make the same calls."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, Any] = {}

    def share(self, key: Hashable, make: Callable[[], Parsed]) -> Parsed:
        """The part that is stored for `key`, else `make()`."""
        if key not in self._parts:
            if len(self._parts) >= MOST_SHARED:
                self._parts.clear()
            self._parts[key] = make()
        part: Parsed = self._parts[key]
        return part


def read_dump(
    data: bytes, source: str, most_values: int = MOST_VALUES, shared: SharedParts | None = None
) -> FlightDump:
    """Read a dump. Dumps that are read with the same `shared` use less memory. Raises `Unreadable`."""
    dump = load_pickle(data, most_values) if data[:1] == pickle.PROTO else load_json(data, most_values)
    if not isinstance(dump, dict) or not any(key in dump for key in KEYS):
        raise Unreadable("not a flight-recorder dump: it has neither entries nor process groups")
    entries = dump.get("entries") or []  # JSON omits the key if there are none
    if not isinstance(entries, list):
        raise Unreadable("its entries are not a list")
    cache = _PartCache(shared or SharedParts())
    records = [_record(index, entry, cache) for index, entry in enumerate(entries[-MOST_RECORDS:])]
    rank = as_integer(dump.get("rank"))
    return FlightDump(
        source,
        rank if rank is not None and rank >= 0 else _rank_from_name(source),
        as_text(dump.get("version")),
        records,
        _members(dump.get("pg_config"), cache),
        _statuses(dump.get("pg_status"), records),
    )


class _PartCache:
    """Parses each part of a dump once, since a pickle may refer to one part in fifty thousand places."""

    def __init__(self, shared: SharedParts) -> None:
        self._shared = shared
        self._parsed: dict[tuple[Callable[[Any], Any], int], Any] = {}

    def parse(self, parser: Callable[[Any], Parsed], part: Any) -> Parsed:
        key = (parser, id(part))
        if key not in self._parsed:
            self._parsed[key] = self._parse(parser, part)
        parsed: Parsed = self._parsed[key]
        return parsed

    def text(self, text: str) -> str:
        return self._shared.share(text, lambda: text)

    def _parse(self, parser: Callable[[Any], Parsed], part: Any) -> Parsed:
        if isinstance(part, str):
            return self._shared.share((parser, part), lambda: parser(part))
        parsed = parser(part)
        return self._shared.share((parser, repr(parsed)), lambda: parsed)


def _rank_from_name(source: str) -> int | None:
    """The rank at the end of a file name, as torch's own analyzer expects; an extension may follow."""
    stem = re.sub(r"(\.[A-Za-z]{1,8}){0,3}$", "", _base_name(source)[-200:])
    ending = re.search(r"[0-9]{1,6}$", stem)
    rank = rank_from_path(source)
    return int(ending[0]) if rank is None and ending else rank


def _record(index: int, entry: Any, cache: _PartCache) -> Record:
    seq = as_integer(entry.get("collective_seq_id", entry.get("seq_id"))) if isinstance(entry, dict) else None
    if seq is None:
        raise Unreadable(f"its entry {index} has no sequence number")
    op = cache.text(as_text(entry.get("profiling_name")))
    state = as_text(entry.get("state"))
    return {
        "group": cache.text(_group_name(entry.get("process_group"), entry.get("pg_id"))),
        "seq": seq,
        "op": op,
        "sizes": cache.parse(_sizes, entry.get("input_sizes")),
        "outputs": cache.parse(_sizes, entry.get("output_sizes")),
        "dtypes": cache.parse(_dtypes, entry.get("input_dtypes")),
        "retired": entry.get("retired") is True,
        "state": cache.text(state) if state in STATES else "scheduled",
        "p2p": entry.get("is_p2p") is True or bool(re.search(r"(^|:)(send|recv)\b", op)),
        "frames": cache.parse(_user_frames, entry.get("frames")),
        "record_id": as_integer(entry.get("record_id")) or 0,
        "time_created_ns": as_integer(entry.get("time_created_ns")) or 0,
        "timeout_ms": as_integer(entry.get("timeout_ms")) or 0,
        "pg_id": as_integer(entry.get("pg_id")),
    }


def _group_name(process_group: Any, number: Any = None) -> str:
    """`name:description`, or the group's number in dumps of versions without names."""
    parts = _items(process_group, 2) if isinstance(process_group, (list, tuple)) else [process_group]
    name = ":".join(part for part in map(as_text, parts) if part not in ("", "undefined"))
    return name or str(as_integer(number) or 0)


def _items(value: Any, most: int) -> list[Any]:
    return list(value[:most]) if isinstance(value, (list, tuple)) else []


def _sizes(tensors: Any) -> list[list[int]]:
    return [[as_integer(size) or 0 for size in _items(shape, 16)] for shape in _items(tensors, MOST_TENSORS)]


def _dtypes(tensors: Any) -> list[str]:
    return [as_text(dtype, 40) for dtype in _items(tensors, MOST_TENSORS)]


def _user_frames(stack: Any) -> list[str]:
    """Frames like `train.py:42 step`, innermost first, without libraries; if that leaves none, only without torch."""
    places = [
        _place(as_text(frame.get("filename"), 500), as_integer(frame.get("line")), as_text(frame.get("name"), 80))
        for frame in _items(stack, MOST_FRAMES)
        if isinstance(frame, dict)
    ]
    own = [place for place, library in places if not library]
    return own or [place for place, library in places if library != "torch"]


@lru_cache(4096)
def _place(file: str, line: int | None, name: str) -> tuple[str, str]:
    library = "torch" if TORCH.search(file) else "other" if LIBRARY.search(file) else ""
    return f"{_base_name(file)}:{line} {name}", library


def _base_name(path: str) -> str:
    return re.split(r"[/\\]", path)[-1]


def _members(config: Any, cache: _PartCache) -> dict[str, frozenset[int]]:
    """The ranks of each group that the dump lists. gloo lists all groups under one empty name, often without ranks."""
    members = {}
    for name, group in list(config.items())[:MOST_RECORDS] if isinstance(config, dict) else ():
        ranks = cache.parse(_ranks, group.get("ranks")) if isinstance(group, dict) else frozenset()
        if ranks and as_text(name):
            members[_group_name([name, group.get("desc")])] = ranks
    return members


def _ranks(value: Any) -> frozenset[int]:
    """The ranks of a list, or of text like `[0, 1]`, which torch writes."""
    items = re.findall(r"\d{1,9}", value[:LONGEST_RANKS]) if isinstance(value, str) else _items(value, MOST_RANKS)
    return frozenset(rank for item in items if (rank := as_integer(item)) is not None)


def _statuses(status: Any, records: list[Record]) -> dict[str, GroupStatus]:
    """The status of each group. torch lists it under a number that differs between ranks; records map it to a name."""
    groups = {0: "0:default_pg", **{record["pg_id"]: record["group"] for record in records}}
    statuses = {}
    for number, fields in list(status.items())[:MOST_RECORDS] if isinstance(status, dict) else ():
        group = groups.get(as_integer(number))
        if group and isinstance(fields, dict):
            statuses[group] = GroupStatus(*(as_integer(fields.get(f"last_{stage}_collective")) for stage in STAGES))
    return statuses
