"""Writes the search index: the entries' texts as postings, and the tables beside them.

Only a build loads this: a search starts without Whoosh's writer and without the parsers of entries.
"""

from __future__ import annotations

import gc
import json
import marshal
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from heapq import merge
from itertools import groupby
from operator import itemgetter
from typing import IO, Any

from whoosh import writing
from whoosh.filedb.filestore import Storage

from kb.content.roots import Root
from kb.search import document
from kb.search.whoosh_codec import BODY, Codec, Term, schema

GRAM = 5  # characters
MOST_HELD = 1 << 20  # postings in memory during a build: about 100 MB
FACETS = ("area", "tags", "frameworks", "status", "applies_to", "fixed_in")

Side = dict[str, Any]


def write(storage: Storage, roots: tuple[Root, ...], wanted: str, notice: Callable[[str], None]) -> tuple[Side, Side]:
    """Write every current entry; returns what is kept beside the index: for any search, and for some."""
    ids: list[str] = []
    facets: list[dict[str, Any]] = []
    words: Counter[str] = Counter()
    with _rare_garbage_collection():
        documents, side = document.collect(roots, notice)
        with _writing(storage) as writer:
            for stored, parts in documents:
                writer.add_document(**{BODY: parts, "document": json.dumps(stored, ensure_ascii=False)})
                ids.append("" if stored["status"] == "withdrawn" else stored["id"])
                facets.append({name: stored[name] for name in FACETS})
                words.update(document.plain_words(parts))
    grams = _grams([one["literals"] for one in side["signatures"]])
    later = {"surfaces": document.surfaces(words), "facets": facets}
    return {**side, "stamp": wanted, "documents": len(ids), "ids": ids, "grams": grams}, later


@contextmanager
def _writing(storage: Storage) -> Iterator[writing.SegmentWriter]:
    """A writer of one segment, committed at the end, or on any error given up."""
    writer = storage.create_index(schema()).writer(codec=Codec())
    writer.pool = _Pool()
    try:
        yield writer
        writer.commit(optimize=True)
    except BaseException:
        writer.cancel()
        raise


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    """A build makes millions of objects and few circles; looking for those takes a quarter of its time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 10, 10)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _grams(literals: list[list[str]]) -> dict[str, list[int]]:
    """Some characters of each literal, those that the fewest literals have, to the numbers of their signatures."""
    counts = Counter(gram for texts in literals for text in texts for gram in set(_grams_of(text)))
    table: dict[str, list[int]] = {}
    for number, texts in enumerate(literals):
        for gram in {min(_grams_of(text), key=lambda one: counts[one]) for text in texts} or {""}:
            table.setdefault(gram, []).append(number)
    return table


def _grams_of(text: str) -> list[str]:
    """Its pieces of `GRAM` characters; the whole of a shorter text."""
    return [text[at : at + GRAM] for at in range(max(1, len(text) - GRAM + 1))]


class _Pool:
    """Postings on their way into the index, by term. Whoosh's own pool pickles and compares each of them twice.

    Every `MOST_HELD` they go to a temporary file, sorted by term; `iter_postings` merges those.
    """

    def __init__(self) -> None:
        self._terms: dict[bytes, Term] = {}
        self._held = 0
        self._runs: list[IO[bytes]] = []

    def add(self, posting: tuple[str, bytes, int, float, bytes]) -> None:
        _, term, number, weight, places = posting
        found = self._terms.get(term)
        if found is None:
            found = self._terms[term] = (array("I"), array("f"), [])
        found[0].append(number)
        found[1].append(weight)
        found[2].append(places)
        self._held += 1
        if self._held >= MOST_HELD:
            self._spill()

    def iter_postings(self) -> Iterator[tuple[bytes, Term]]:
        """Terms in order, each with all of its postings, in the order of the documents."""
        held = ((term, self._terms.pop(term)) for term in sorted(self._terms))
        merged = merge(*map(_read_run, self._runs), held, key=itemgetter(0))
        for term, parts in groupby(merged, key=itemgetter(0)):
            (_, (numbers, weights, places)), *others = parts
            for _, more in others:
                numbers.extend(more[0])
                weights.extend(more[1])
                places.extend(more[2])
            yield term, (numbers, weights, places)

    def cleanup(self) -> None:
        for file in self._runs:
            file.close()

    def _spill(self) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by cleanup
        self._runs.append(file)
        for term in sorted(self._terms):
            numbers, weights, places = self._terms[term]
            marshal.dump((term, numbers.tobytes(), weights.tobytes(), places), file)
        file.seek(0)
        self._terms, self._held = {}, 0


def _read_run(file: IO[bytes]) -> Iterator[tuple[bytes, Term]]:
    with suppress(EOFError):
        while True:
            term, numbers, weights, places = marshal.load(file)  # noqa: S302  # we wrote it a moment ago  # nosec B302
            yield term, (array("I", numbers), array("f", weights), places)
