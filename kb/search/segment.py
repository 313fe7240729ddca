"""One segment of the index: entries that were indexed together, in files that never change.

An index has one or more of them. Entries that were changed or removed since are `dead`: their postings are still there,
but are skipped. Opening a Whoosh index runs pickles, so a segment is opened only where nobody else can write.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

from whoosh.filedb.filestore import RamStorage, Storage
from whoosh.index import FileIndex

from kb.search.segment_file import SegmentStorage
from kb.search.whoosh_codec import BODY, Postings, read_postings

TABLES = "tables.json"  # read by every search
SIGNATURES, LOOKUPS = "signatures.json", "lookups.json"  # read by some searches
RECORDS = "records.json"  # read by updates

Tables = dict[str, Any]
Signature = dict[str, Any]


class LazyTables:
    """Tables by name. Files are opened at once, since another process may have removed them when they are read."""

    def __init__(self) -> None:
        self._files: dict[str, IO[bytes]] = {}
        self._tables: dict[str, Tables] = {}

    def add(self, name: str, file: IO[bytes]) -> None:
        self._files[name] = file

    def __getitem__(self, name: str) -> Tables:
        if name not in self._tables:
            self._tables[name] = json.load(self._files[name])
        return self._tables[name]

    def close(self) -> None:
        for file in self._files.values():
            file.close()


class Segment:
    """A segment that is open for reading. The numbers of its documents begin at `first`."""

    def __init__(self, storage: Storage, tables: Tables, lazy: LazyTables, first: int, dead: frozenset[int]) -> None:
        self._first = first
        self._dead = frozenset(first + number for number in dead)
        self._tables = tables
        self._lazy = lazy
        self.identity: str = tables["identity"]
        self.end = first + len(tables["ids"])
        self._storage = storage
        try:
            self._reader = FileIndex(storage).reader()
            self._read_first_document()
        except BaseException:
            storage.close()
            raise

    def _read_first_document(self) -> None:
        """Read a document, since only that shows whether the segment is torn."""
        if int(self._reader.doc_count_all()) != self.end - self._first:
            raise EOFError("the segment has another number of documents")
        if self.end > self._first:
            self.document(self._first)

    @classmethod
    def open(
        cls, directory: Path, recipe: str, identity: str = "", first: int = 0, dead: frozenset[int] = frozenset()
    ) -> Self:
        """Open a segment. Raises any exception if it is torn, has another recipe, or is not the one asked for."""
        tables = json.loads((directory / TABLES).read_bytes())
        if tables["recipe"] != recipe or identity not in ("", tables["identity"]):
            raise ValueError("another segment")
        lazy = LazyTables()
        try:
            for name in (SIGNATURES, LOOKUPS):
                lazy.add(name, (directory / name).open("rb"))
            return cls(SegmentStorage(str(directory)), tables, lazy, first, dead)
        except BaseException:
            lazy.close()
            raise

    @classmethod
    def in_memory(cls, storage: RamStorage, tables: dict[str, Tables], first: int, dead: frozenset[int]) -> Self:
        """Open a segment in memory. `tables` are the contents of its files by name."""
        lazy = LazyTables()
        for name in (SIGNATURES, LOOKUPS):
            lazy.add(name, io.BytesIO(json.dumps(tables[name]).encode()))
        return cls(storage, tables[TABLES], lazy, first, dead)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._reader.close()
        self._storage.close()
        self._lazy.close()

    @property
    def has_dead(self) -> bool:
        return bool(self._dead)

    def ids(self) -> Iterator[tuple[int, str]]:
        """The number and id of every entry that is not dead."""
        return self._live(self._tables["ids"])

    def withdrawn(self) -> frozenset[int]:
        return frozenset(self._first + number for number in self._tables["withdrawn"])

    def declared(self) -> Iterator[tuple[int, int]]:
        """The facets of each entry, as `kb.content.facets.bits`."""
        return self._live(self._tables["declared"])

    def lengths(self) -> Iterator[tuple[int, int]]:
        """The number of terms in each document."""
        return self._live(self._tables["lengths"])

    def rounded_lengths(self) -> Iterator[tuple[int, int]]:
        """The same as Whoosh stores them, in one byte."""
        return self._live(self._tables["rounded_lengths"])

    @property
    def signatures(self) -> list[Signature]:
        return [signature for signature in self._lazy[SIGNATURES]["signatures"] if self._is_live(signature)]

    def frequency(self, term: str) -> int:
        """The number of documents that have a term."""
        count = int(self._reader.doc_frequency(BODY, term))
        return len(self.postings(term).numbers) if count and self._dead else count

    def postings(self, term: str) -> Postings:
        """The postings of a term. Raises whatever Whoosh raises if no document has the term."""
        postings = read_postings(self._reader, term).shifted(self._first)
        return postings.without(self._dead) if self._dead else postings

    def document(self, number: int) -> str:
        """The stored document, as JSON."""
        return str(self._reader.stored_fields(number - self._first)["document"])

    def facets(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._live(self._lazy[LOOKUPS]["facets"])

    def spellings(self) -> list[tuple[str, int, str]]:
        """(spelling, count, term) for plain English words, dead entries included, most common first."""
        return [(spelling, count, term) for spelling, count, term in self._lazy[LOOKUPS]["spellings"]]

    def signatures_in(self, text: str) -> list[Signature]:
        """The signatures that may match a text, because it has one of their literals or they have none."""
        grams: dict[str, list[int]] = self._tables["grams"]
        pieces = {text[at : at + length] for length in set(map(len, grams)) for at in range(len(text))}
        numbers = sorted({number for piece in pieces & grams.keys() for number in grams[piece]})
        if not numbers:
            return []
        signatures = self._lazy[SIGNATURES]["signatures"]
        offered = (signatures[number] for number in numbers)
        return [signature for signature in offered if self._is_live(signature) and _may_match(signature, text)]

    def _live(self, column: list[Any]) -> Iterator[tuple[int, Any]]:
        rows = enumerate(column, self._first)
        return (row for row in rows if row[0] not in self._dead) if self._dead else rows

    def _is_live(self, signature: Signature) -> bool:
        return self._first + signature["document"] not in self._dead


def _may_match(signature: Signature, text: str) -> bool:
    return not signature["literals"] or any(literal in text for literal in signature["literals"])
