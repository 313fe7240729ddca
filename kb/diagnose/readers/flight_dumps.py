"""The flight-recorder dumps of a job in bounded memory: if there are too many collectives, the last of each rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from kb.diagnose.evidence import Line
from kb.diagnose.readers.flight_comparison import compare_dumps
from kb.diagnose.readers.flight_recorder import FlightDump, SharedParts, read_dump

ROOM = 4  # a quarter of the memory is freed at a time


@dataclass(slots=True)
class FlightDumps:
    """`add` the dumps, then `compare` them. At most `most` collectives stay in memory, over all dumps."""

    most: int
    _dumps: list[FlightDump] = field(default_factory=list)
    _shared: SharedParts = field(default_factory=SharedParts)
    _count: int = 0  # collectives in memory
    _last: int | None = None  # most collectives that each dump keeps; None while none was dropped

    def add(self, data: bytes, source: str, most_values: int, ahead_s: float = 0.0) -> None:
        """Add a dump; `ahead_s` is how far the clock of its node was ahead. Raises `Unreadable`."""
        dump = read_dump(data, source, most_values, self._shared)
        if ahead_s:
            _correct(dump.records, ahead_s)
        self._dumps.append(dump)
        self._count += len(dump.records)
        if self._count > self.most:
            self._shorten((self.most - self.most // ROOM) // len(self._dumps))

    def compare(self) -> list[Line]:
        """The sentences about the dumps, without collectives that are in memory for only some of the ranks."""
        if self._last is not None:
            self._shorten(self._last)
        return compare_dumps(self._dumps)

    def problems(self) -> Iterator[str]:
        if self._last is not None:
            yield (
                f"{self._dumps[0].source}: {len(self._dumps):,} dumps have more than {self.most:,} collectives; "
                f"the last {self._last:,} of each are compared"
            )

    def _shorten(self, last: int) -> None:
        self._last = max(1, last)
        self._dumps = [_shortened(dump, self._last) for dump in self._dumps]
        self._count = sum(len(dump.records) for dump in self._dumps)


def _correct(records: Iterable[dict[str, Any]], ahead_s: float) -> None:
    """Convert times by the node's clock to times by kb's."""
    for record in records:
        if record["time_created_ns"]:
            record["time_created_ns"] -= round(ahead_s * 1e9)


def _shortened(dump: FlightDump, last: int) -> FlightDump:
    """The dump as if the rank's ring buffer were shorter; a first id above 0 means that records were overwritten."""
    if len(dump.records) <= last:
        return dump
    records = dump.records[-last:]
    records[0] = {**records[0], "record_id": max(1, records[0]["record_id"])}
    return replace(dump, records=records)
