"""Plans a new generation of the index: entries that segments already hold, and entry files to index now.

Reading and indexing an entry takes some hundredths of a second. So an entry is indexed again only if its text has
changed, or if an id that it mentions became an id of an entry, or ceased to be one.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from kb.content.admission import refusal
from kb.content.causes import edges
from kb.content.roots import Root
from kb.search import cues, synonyms
from kb.search.entry_record import EntryRecord
from kb.search.fingerprints import FileState
from kb.search.segment import RECORDS, Segment

MOST_SEGMENTS = 8  # each costs a search some milliseconds


@dataclass(frozen=True, slots=True)
class IndexedSegment:
    """A segment that can be used again. `path` is how a generation refers to it."""

    path: str
    identity: str
    records: tuple[EntryRecord, ...]

    @classmethod
    def load(cls, directory: Path, path: str, recipe: str) -> IndexedSegment | None:
        """The segment in a directory; None if it is torn or has another recipe."""
        try:
            with Segment.open(directory, recipe) as segment:
                rows = json.loads((directory / RECORDS).read_bytes())["records"]
                records = tuple(EntryRecord(**row) for row in rows)
                return cls(path, segment.identity, records) if len(records) == segment.end else None
        except Exception:  # Whoosh raises anything on a torn index: EOFError, zlib.error, TypeError, struct.error ...
            return None


class EntryFile(NamedTuple):
    """An entry file in its present state."""

    path: Path
    origin: str
    id: str  # of its entry, if it can be read: any other id is an error
    digest: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The same as `EntryRecord.key`."""
        return self.origin, self.id, self.digest


class Place(NamedTuple):
    """Where an entry is indexed."""

    segment: IndexedSegment
    number: int

    @property
    def record(self) -> EntryRecord:
        return self.segment.records[self.number]


@dataclass(frozen=True, slots=True)
class Plan:
    """A generation before it is written. `pending` are the files to index now, by id."""

    files: tuple[EntryFile, ...]
    ids: frozenset[str]
    places: Mapping[tuple[str, str, str], Place]
    pending: tuple[EntryFile, ...]


def plan(roots: Sequence[Root], states: Mapping[Path, FileState], segments: Sequence[IndexedSegment]) -> Plan:
    """Decide which files have to be indexed. `segments` are those that can be used again."""
    files = tuple(
        EntryFile(path, root.name, path.stem, state[2])
        for root in roots
        for path, state in states.items()
        if path.parent == root.entries
    )
    ids = frozenset(file.id for file in files)
    places = _dense(
        {
            record.key: Place(segment, number)
            for segment in segments
            for number, record in enumerate(segment.records)
            if record.is_valid_among(ids)
        },
        files,
    )
    pending = (file for file in files if file.key not in places)
    return Plan(files, ids, places, tuple(sorted(pending, key=lambda file: file.id)))


def _dense(places: dict[tuple[str, str, str], Place], files: Iterable[EntryFile]) -> dict[tuple[str, str, str], Place]:
    """The places without those in segments that are better written again.

    These are segments of which half or less is in use, and the smallest if there are many, since each slows every
    search.
    """
    used = Counter(places[file.key].segment.identity for file in files if file.key in places)
    sizes = {place.segment.identity: len(place.segment.records) for place in places.values()}
    dense = [identity for identity, count in used.items() if 2 * count > sizes[identity]]
    if len(dense) >= MOST_SEGMENTS:
        dense = sorted(dense, key=used.__getitem__)[-MOST_SEGMENTS // 2 :]
    return {key: place for key, place in places.items() if place.segment.identity in dense}


def generation_tables(
    planned: Plan, indexed: Sequence[IndexedSegment], unreadable: Mapping[str, str]
) -> dict[str, Any]:
    """The tables of the generation, once the pending files are indexed. `unreadable` are paths and their problems.

    Entries are admitted as in `load_catalog`. All other documents of a segment are dead.
    """
    new = {
        (record.origin, record.id): Place(segment, number)
        for segment in indexed
        for number, record in enumerate(segment.records)
    }
    admitted: dict[str, tuple[Path, Place]] = {}
    problems: list[str] = []
    for file in planned.files:
        place = planned.places.get(file.key) or new.get((file.origin, file.id))
        if place is None:
            problems.append(unreadable.get(str(file.path), f"{file.path} cannot be read"))
            continue
        record = place.record
        earlier, _ = admitted.get(file.id, (None, None))
        problem = refusal(file.path, record.id_line, record.id, record.replaces, earlier)
        if problem:
            problems.append(problem.message)
        else:
            admitted[file.id] = file.path, place
    records = [place.record for _, place in admitted.values()]
    causes, masks = edges(record.links for record in records if record.is_current)
    return {
        "segments": _rows(place for _, place in admitted.values()),
        "causes": causes,
        "masks": masks,
        "cues": list(cues.cues().items()),
        "out_of_scope": cues.out_of_scope(),
        "synonyms": list(synonyms.synonyms().items()),
        "problems": problems,
    }


def _rows(places: Iterable[Place]) -> list[dict[str, Any]]:
    """The segments in use, with the numbers of their dead documents."""
    segments: dict[str, IndexedSegment] = {}
    numbers: dict[str, set[int]] = {}
    for segment, number in places:
        segments[segment.path] = segment
        numbers.setdefault(segment.path, set()).add(number)
    return [
        {
            "path": path,
            "identity": segments[path].identity,
            "dead": sorted(set(range(len(segments[path].records))) - numbers[path]),
        }
        for path in sorted(segments)
    ]
