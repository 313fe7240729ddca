"""Writes a segment of the index: the texts of entries as postings, and the tables next to them.

Only a build loads this module, so a search starts without Whoosh's writer and the parsers of entries.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from whoosh import writing
from whoosh.filedb.filestore import FileStorage, RamStorage, Storage
from whoosh.util.numeric import byte_to_length, length_to_byte

from kb.content.entry import Entry
from kb.content.facets import bits
from kb.content.parser import read_entry
from kb.errors import ContentError
from kb.search import document
from kb.search.entry_record import EntryRecord
from kb.search.fingerprints import recipe
from kb.search.index_update import IndexedSegment
from kb.search.postings_pool import PostingsPool
from kb.search.segment import LOOKUPS, RECORDS, SIGNATURES, TABLES, Segment, Tables
from kb.search.whoosh_codec import BODY, Codec, schema

GRAM = 5  # characters
FACETS = ("area", "tags", "frameworks", "status", "applies_to", "fixed_in")
PATIENCE_S = 1.0  # a build that takes longer reports it

Files = Sequence[tuple[Path, str]]  # each with the origin of its entry, in the order of the ids
Notify = Callable[[str], None]


def write_segment(directory: Path, files: Files, ids: Set[str], notify: Notify = lambda _: None) -> dict[str, str]:
    """Index entry files into an empty directory. `ids` are the ids of all entries.

    Returns the problems of unreadable files, by path. Only one entry is in memory at a time.
    """
    tables, problems = _write(FileStorage(str(directory)), files, ids, notify)
    for name, content in tables.items():
        (directory / name).write_text(json.dumps(content))
    return problems


def write_in_memory(
    files: Files, ids: Set[str], notify: Notify
) -> tuple[Callable[[int, frozenset[int]], Segment], IndexedSegment, dict[str, str]]:
    """The same without files.

    Returns a function that opens the segment, given its first number and dead documents; its records; and the problems.
    """
    storage = RamStorage()
    tables, problems = _write(storage, files, ids, notify)
    records = tuple(EntryRecord(**row) for row in tables[RECORDS]["records"])
    indexed = IndexedSegment("", tables[TABLES]["identity"], records)
    return partial(Segment.in_memory, storage, tables), indexed, problems


def _write(storage: Storage, files: Files, ids: Set[str], notify: Notify) -> tuple[dict[str, Tables], dict[str, str]]:
    """Returns the tables of the segment by their file names, and the problems of files."""
    facets: list[dict[str, Any]] = []
    declared: list[int] = []
    lengths: list[int] = []
    problems: dict[str, str] = {}
    records: list[EntryRecord] = []
    signatures: list[dict[str, Any]] = []
    words: Counter[str] = Counter()
    with _rare_garbage_collection(), _writing(storage) as writer:
        for number, entry in enumerate(_entries(files, problems, notify)):
            stored, parts = document.document(entry, ids)
            lengths.append(_add(writer, number, json.dumps(stored, ensure_ascii=False), parts))
            facets.append({name: stored[name] for name in FACETS})
            declared.append(bits(entry.facets))
            records.append(EntryRecord.of(entry).among(ids))
            signatures += ({**signature, "document": number} for signature in document.signatures(entry))
            words.update(document.plain_words(parts))
    rows = [asdict(record) for record in records]
    tables = {
        "recipe": recipe(),
        "identity": hashlib.sha256(json.dumps(rows).encode()).hexdigest(),
        "ids": [record.id for record in records],
        "withdrawn": [number for number, record in enumerate(records) if not record.is_current],
        "declared": declared,
        "lengths": lengths,
        "rounded_lengths": [byte_to_length(length_to_byte(length)) for length in lengths],
        "grams": _grams([signature["literals"] for signature in signatures]),
    }
    return {
        TABLES: tables,
        SIGNATURES: {"signatures": signatures},
        LOOKUPS: {"spellings": document.spellings(words), "facets": facets},
        RECORDS: {"records": rows},
    }, problems


def _entries(files: Files, problems: dict[str, str], notify: Notify) -> Iterator[Entry]:
    """Yield the entries that can be read, and add the problems of the others to `problems`."""
    started = time.monotonic()
    for path, origin in files:
        if time.monotonic() - started > PATIENCE_S:
            notify(building(len(files)))
            started = float("inf")
        try:
            yield read_entry(path, origin)
        except ContentError as problem:
            problems[str(path)] = problem.message


def building(count: int) -> str:
    return f"building the search index of {count} entries (once, and after a change) ..."


@contextmanager
def _writing(storage: Storage) -> Iterator[writing.SegmentWriter]:
    """A writer of one segment, committed at the end, cancelled on any error."""
    writer = storage.create_index(schema()).writer(codec=Codec())
    writer.pool = PostingsPool()
    try:
        yield writer
        writer.commit(optimize=True)
    except BaseException:
        with suppress(Exception):  # after a failed write Whoosh fails again, on files that it has closed
            writer.cancel()
        raise


def _add(writer: writing.SegmentWriter, number: int, stored: str, parts: list[tuple[float, str]]) -> int:
    """Add a document as `writer.add_document` does, but without a call for each posting. Returns its length."""
    documents, fields = writer.perdocwriter, writer.schema
    documents.start_doc(number)
    length: int = writer.pool.add(number, parts)
    documents.add_field(BODY, fields[BODY], None, length)
    documents.add_field("document", fields["document"], stored, 0)
    documents.finish_doc()
    writer._added = True
    writer.docnum += 1
    return length


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """Collect garbage rarely: a build makes millions of objects but few cycles, and searching for them takes a quarter
    of its time.
    """
    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _grams(literals: list[list[str]]) -> dict[str, list[int]]:
    """Map a gram of each literal, the one that the fewest literals have, to the numbers of its signatures."""
    counts = Counter(gram for texts in literals for text in texts for gram in set(_grams_of(text)))
    table: dict[str, list[int]] = {}
    for number, texts in enumerate(literals):
        for gram in {min(_grams_of(text), key=counts.__getitem__) for text in texts} or {""}:
            table.setdefault(gram, []).append(number)
    return table


def _grams_of(text: str) -> list[str]:
    """The pieces of `GRAM` characters of a text; the whole text if it is shorter."""
    return [text[at : at + GRAM] for at in range(max(1, len(text) - GRAM + 1))]
