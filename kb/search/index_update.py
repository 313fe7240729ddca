"""What a new generation of the index is made of: entries that indexed segments still hold, and entries to index now.

Reading and indexing an entry takes some hundredths of a second, so an entry is indexed again only when its text has
changed, or when an id that it mentions has become, or is no longer, an entry's.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kb.content.admission import refusal
from kb.content.causes import edges
from kb.content.roots import Root
from kb.errors import ContentError
from kb.search import synonyms
from kb.search.entry_record import EntryRecord
from kb.search.fingerprints import FileState
from kb.search.segment import RECORDS, Segment

if TYPE_CHECKING:
    from kb.content.entry import Entry

MOST_SEGMENTS = 8  # each costs a search some milliseconds


@dataclass(frozen=True, slots=True)
class IndexedSegment:
    """A segment on disk that can be used again. `path` is how a generation refers to it."""

    path: str
    identity: str
    records: tuple[EntryRecord, ...]

    @classmethod
    def load(cls, directory: Path, path: str, recipe: str) -> IndexedSegment | None:
        """None for one that is torn or of another recipe."""
        try:
            with Segment.open(directory, recipe) as segment:
                rows = json.loads((directory / RECORDS).read_bytes())["records"]
                records = tuple(EntryRecord(**row) for row in rows)
                return cls(path, segment.identity, records) if len(records) == segment.end else None
        except Exception:  # Whoosh raises anything on a torn index: EOFError, zlib.error, TypeError, struct.error ...
            return None


class Place(NamedTuple):
    """Where an entry is indexed."""

    segment: int
    number: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A generation before it is written. `entries` are to be indexed now, as a segment after the `segments`.

    `segments` are those used again, each with the numbers of its dead documents.
    """

    segments: tuple[tuple[IndexedSegment, tuple[int, ...]], ...]
    entries: dict[str, Entry]
    ids: frozenset[str]
    tables: dict[str, Any]


@dataclass(slots=True)
class _Candidate:
    """An entry file: its record, and either its place or its parsed entry."""

    path: Path
    origin: str
    record: EntryRecord
    place: Place | None
    entry: Entry | None


def plan(roots: Sequence[Root], states: Mapping[Path, FileState], segments: Sequence[IndexedSegment]) -> Plan:
    """The generation that holds every admitted entry once. Reads the files that no segment has."""
    places = _usable_places(roots, states, segments)
    candidates, problems = _admitted(roots, states, segments, places)
    ids = frozenset(candidates)
    for candidate in candidates.values():
        if candidate.place and not candidate.record.is_valid_among(ids):
            _index_again(candidate)
    used: dict[int, set[int]] = {}
    for candidate in candidates.values():
        if candidate.place:
            used.setdefault(candidate.place.segment, set()).add(candidate.place.number)
    current = [candidate.record for candidate in candidates.values() if candidate.record.is_current]
    causes, masks = edges(record.links for record in current)
    return Plan(
        segments=tuple(
            (segments[at], tuple(sorted(set(range(len(segments[at].records))) - numbers)))
            for at, numbers in sorted(used.items())
        ),
        entries={entry_id: candidate.entry for entry_id, candidate in candidates.items() if candidate.entry},
        ids=ids,
        tables={
            "causes": causes,
            "masks": masks,
            "synonyms": list(synonyms.synonyms().items()),
            "problems": [problem.message for problem in problems],
        },
    )


def needs_indexing(roots: Sequence[Root], states: Mapping[Path, FileState], segments: Sequence[IndexedSegment]) -> bool:
    """Whether a file has not been indexed as it is now."""
    places = _usable_places(roots, states, segments)
    return any(_key(root, path, states) not in places for root in roots for path in _files(root, states))


def _admitted(
    roots: Sequence[Root],
    states: Mapping[Path, FileState],
    segments: Sequence[IndexedSegment],
    places: Mapping[tuple[str, str, str], Place],
) -> tuple[dict[str, _Candidate], list[ContentError]]:
    """The entries by id, as `load_catalog` admits them, and why others are left out."""
    candidates: dict[str, _Candidate] = {}
    problems: list[ContentError] = []
    for root in roots:
        for path in _files(root, states):
            try:
                candidate = _candidate(root, path, places.get(_key(root, path, states)), segments)
            except ContentError as problem:
                problems.append(problem)
                continue
            record = candidate.record
            earlier = candidates.get(record.id)
            earlier_path = earlier.path if earlier else None
            refused = refusal(path, record.id_line, record.id, record.replaces, earlier_path)
            if refused:
                problems.append(refused)
            else:
                candidates[record.id] = candidate
    return candidates, problems


def _candidate(root: Root, path: Path, place: Place | None, segments: Sequence[IndexedSegment]) -> _Candidate:
    if place:
        return _Candidate(path, root.name, segments[place.segment].records[place.number], place, None)
    entry = _read_entry(path, root.name)
    return _Candidate(path, root.name, EntryRecord.of(entry), None, entry)


def _index_again(candidate: _Candidate) -> None:
    with suppress(ContentError):  # changed in this very moment: the next search sees it
        candidate.entry = _read_entry(candidate.path, candidate.origin)
        candidate.place = None


def _read_entry(path: Path, origin: str) -> Entry:
    from kb.content.parser import read_entry  # most updates find a place for all or nearly all entries

    return read_entry(path, origin)


def _usable_places(
    roots: Sequence[Root], states: Mapping[Path, FileState], segments: Sequence[IndexedSegment]
) -> dict[tuple[str, str, str], Place]:
    """Where the entries with these keys are, less the segments that are better written again.

    That are segments of which less than half is in use, and the smallest when there are many: each costs every search
    some time.
    """
    places = {
        record.key: Place(at, number)
        for at, segment in enumerate(segments)
        for number, record in enumerate(segment.records)
    }
    wanted = {_key(root, path, states) for root in roots for path in _files(root, states)}
    used = Counter(places[key].segment for key in wanted & places.keys())
    dense = [at for at, count in used.items() if 2 * count > len(segments[at].records)]
    if len(dense) >= MOST_SEGMENTS:
        dense = sorted(dense, key=lambda at: used[at])[-MOST_SEGMENTS // 2 :]
    return {key: place for key, place in places.items() if place.segment in dense}


def _key(root: Root, path: Path, states: Mapping[Path, FileState]) -> tuple[str, str, str]:
    return root.name, path.stem, states[path][2]


def _files(root: Root, states: Mapping[Path, FileState]) -> Iterable[Path]:
    return (path for path in states if path.parent == root.entries)
