"""The entries of all content roots by id. Ids are unique unless an entry says `replaces: <id>`."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kb.content.admission import refusal
from kb.content.entry import Entry, Status
from kb.content.parser import read_entry
from kb.content.roots import Root
from kb.errors import ContentError, UnknownEntry

MOST_NEAREST = 10  # ids that share a beginning are a family, such as `oom-`


@dataclass(frozen=True, slots=True)
class Catalog:
    """Entries by id, and the problems of files that could not be read: a broken entry never stops kb."""

    entries: dict[str, Entry]
    problems: tuple[ContentError, ...]
    probes: dict[str, Path]

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())

    def __len__(self) -> int:
        return len(self.entries)

    def get(self, entry_id: str) -> Entry:
        """The entry. Raises the `ContentError` of its file, or `UnknownEntry` with the nearest ids."""
        if entry_id in self.entries:
            return self.entries[entry_id]
        for problem in self.problems:
            if problem.path.stem == entry_id:
                raise problem
        raise UnknownEntry(entry_id, nearest(entry_id, self.entries))

    def probe_file(self, entry: Entry) -> Path | None:
        """The path of the entry's probe; the linter reports a missing file."""
        return self.probes.get(entry.id)

    def current(self) -> list[Entry]:
        """Entries that answer questions: all but the withdrawn ones."""
        return [entry for entry in self if entry.meta.status is not Status.WITHDRAWN]


def load_catalog(roots: Iterable[Root]) -> Catalog:
    """Read every root in order. If an id occurs again, the earlier entry stays and the later one is a problem."""
    entries: dict[str, Entry] = {}
    probes: dict[str, Path] = {}
    problems: list[ContentError] = []
    for root in roots:
        for path in root.entry_files():
            try:
                entry = read_entry(path, root.name)
                _admit(entry, entries)
            except ContentError as problem:
                problems.append(problem)
                continue
            entries[entry.id] = entry
            if entry.meta.probe:
                probes[entry.id] = root.probe_file(entry.meta.probe)
            else:
                probes.pop(entry.id, None)
    return Catalog(dict(sorted(entries.items())), tuple(problems), probes)


def _admit(entry: Entry, entries: dict[str, Entry]) -> None:
    """Raise an error for an id that is taken, and for a `replaces` that replaces nothing."""
    earlier = entries.get(entry.id)
    earlier_path = earlier.path if earlier else None
    problem = refusal(entry.path, entry.id_line, entry.id, entry.meta.replaces, earlier_path)
    if problem:
        raise problem


def nearest(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """Words that an incomplete or mistyped word may mean: those that begin with it or contain it, else similar ones."""
    words, word = list(words), word.lower().replace("_", "-")
    beginning = [known for known in words if known.startswith(word)]
    containing = [known for known in words if word in known and len(word) > 2]
    similar = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    return tuple(dict.fromkeys([*beginning, *containing]))[:MOST_NEAREST] or tuple(similar)


def file_digest(path: Path | None) -> str:
    """sha256 of a file, such as the probe in a report; "" without a file or when it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""
