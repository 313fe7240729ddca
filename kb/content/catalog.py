"""The entries of all content roots by id. Ids are unique unless an entry says `replaces: <id>`."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from kb.content.entry import Entry, Status
from kb.content.parser import read_entry
from kb.content.roots import Root
from kb.errors import ContentError, UnknownEntry


@dataclass(frozen=True, slots=True)
class Catalog:
    """Entries by id, with what could not be read. A broken entry is a problem to show, never one to die of."""

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
        """Where the entry's probe lies (the file may be missing: that is the linter's finding)."""
        return self.probes.get(entry.id)

    def current(self) -> list[Entry]:
        """Entries that answer questions: all but the withdrawn ones."""
        return [entry for entry in self if entry.meta.status is not Status.WITHDRAWN]


def load_catalog(roots: Iterable[Root]) -> Catalog:
    """Read every root, in order. A clash of ids is a problem of the later entry, and the earlier one stays."""
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
    """Refuse an id that is taken, and a `replaces` that replaces nothing."""
    old = entries.get(entry.id)
    line = entry.lines.get(("replaces",), entry.lines.get(("id",), 1))
    if old and entry.meta.replaces != entry.id:
        raise ContentError(entry.path, line, "duplicate-id", f"{old.path} has this id; say `replaces: {entry.id}`")
    if entry.meta.replaces and not (old and entry.meta.replaces == entry.id):
        raise ContentError(entry.path, line, "replaces-nothing", f"no earlier root has {entry.meta.replaces!r}")


def nearest(word: str, words: Iterable[str]) -> tuple[str, ...]:
    """Up to three ids that a mistyped one, or the beginning of one, may have meant, best first."""
    words, word = list(words), word.lower().replace("_", "-")
    begun = [one for one in words if len(word) > 3 and one.startswith(word)]
    close = difflib.get_close_matches(word, words, n=3, cutoff=0.5)
    return tuple(dict.fromkeys([*begun, *close]))[:3] or tuple(one for one in words if word in one)[:3]


def file_digest(path: Path | None) -> str:
    """sha256 of a file, as reports carry it of probes; "" when there is none or it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
    except OSError:
        return ""
