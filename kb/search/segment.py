"""One segment of the index: entries that were indexed together, in files that never change.

An index has one or a few of them. Entries that were changed or removed since are `dead`: their postings are there and
passed over. Opening a Whoosh index runs pickles: a segment is opened only where nobody else can write.
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

TABLES = "tables.json"  # what every search reads
SIGNATURES, LOOKUPS = "signatures.json", "lookups.json"  # what only some read
RECORDS = "records.json"  # what updates read

Tables = dict[str, Any]
Signature = dict[str, Any]


class LazyTables:
    """Tables by name whose files are opened at once and read when needed: by then another process may have removed
    them.
    """

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
    """Open for reading. The numbers of its documents begin at `first`."""

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
        """A torn segment shows only then."""
        if int(self._reader.doc_count_all()) != self.end - self._first:
            raise EOFError("the segment has another number of documents")
        if self.end > self._first:
            self.document(self._first)

    @classmethod
    def open(
        cls, directory: Path, recipe: str, identity: str = "", first: int = 0, dead: frozenset[int] = frozenset()
    ) -> Self:
        """The segment in a directory. Raises anything when it is torn, of another recipe, or another than asked for."""
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
        """The segment of a storage, and of what the files are called and hold otherwise."""
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
        """Number and id of every entry that is not dead."""
        return self._live(self._tables["ids"])

    def withdrawn(self) -> frozenset[int]:
        return frozenset(self._first + number for number in self._tables["withdrawn"])

    def declared(self) -> Iterator[tuple[int, int]]:
        """The facets of each entry, as `kb.content.facets.bits`."""
        return self._live(self._tables["declared"])

    def lengths(self) -> Iterator[tuple[int, int]]:
        """How many terms each document has."""
        return self._live(self._tables["lengths"])

    def rounded_lengths(self) -> Iterator[tuple[int, int]]:
        """The same as Whoosh stores them, in a byte."""
        return self._live(self._tables["rounded_lengths"])

    @property
    def signatures(self) -> list[Signature]:
        return [signature for signature in self._lazy[SIGNATURES]["signatures"] if self._is_live(signature)]

    def frequency(self, term: str) -> int:
        """How many documents have a term."""
        count = int(self._reader.doc_frequency(BODY, term))
        return len(self.postings(term).numbers) if count and self._dead else count

    def postings(self, term: str) -> Postings:
        """Raises what Whoosh raises for a term that no document has."""
        postings = read_postings(self._reader, term).shifted(self._first)
        return postings.without(self._dead) if self._dead else postings

    def document(self, number: int) -> str:
        """What was stored for a document, as JSON."""
        return str(self._reader.stored_fields(number - self._first)["document"])

    def facets(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return self._live(self._lazy[LOOKUPS]["facets"])

    def spellings(self) -> list[tuple[str, int, str]]:
        """(spelling, how often, term) of plain English words, dead entries included; the commonest first."""
        return [(spelling, count, term) for spelling, count, term in self._lazy[LOOKUPS]["spellings"]]

    def signatures_in(self, text: str) -> list[Signature]:
        """The signatures that may match a text: it has one of their literals, or they have none."""
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
