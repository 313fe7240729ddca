"""Postings as kb stores them in a Whoosh index: whole blocks of bytes, quick to write and to read.

A call for each posting, as Whoosh's matchers offer it, is what made ten thousand entries slow. Some attributes used
here and in `kb.search.index_writer` have no public names; Whoosh 2.7.4 is pinned exactly (decision 0003).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from pickle import dumps
from typing import Any, NamedTuple
from zlib import compress

from whoosh import fields
from whoosh.codec import whoosh3
from whoosh.filedb.filestore import Storage
from whoosh.system import pack_int, pack_long, pack_ushort
from whoosh.util.numlists import delta_encode

BODY = "body"
BLOCK = 512  # postings that Whoosh stores, and reads, together

Term = tuple["array[int]", "array[float]", list[bytes]]  # its postings: documents, weights, places


class Postings(NamedTuple):
    """Documents of a term or phrase in ascending order, its weight in each, and its places there.

    The places of document `at` are the 32-bit numbers from byte `starts[at]` to byte `starts[at + 1]`.
    """

    numbers: array[int]
    weights: array[float]
    starts: array[int]
    places: bytes

    def places_in(self, number: int) -> tuple[float, array[int]]:
        """(weight, places) in a document that has the term."""
        at = bisect_left(self.numbers, number)
        return self.weights[at], array("I", self.places[self.starts[at] : self.starts[at + 1]])

    def without(self, numbers: Container[int]) -> Postings:
        """The postings of all other documents."""
        rest = [at for at, number in enumerate(self.numbers) if number not in numbers]
        pieces = [self.places[self.starts[at] : self.starts[at + 1]] for at in rest]
        return Postings(
            array("I", (self.numbers[at] for at in rest)),
            array("f", (self.weights[at] for at in rest)),
            array("I", accumulate(map(len, pieces), initial=0)),
            b"".join(pieces),
        )

    def shifted(self, by: int) -> Postings:
        """The same with document numbers that are higher by a number."""
        return self._replace(numbers=array("I", (number + by for number in self.numbers))) if by else self


def joined(parts: Sequence[Postings]) -> Postings:
    """Postings of ascending ranges of documents as one."""
    if len(parts) == 1:
        return parts[0]
    numbers, weights, starts, places = array("I"), array("f"), array("I", [0]), bytearray()
    for part in parts:
        numbers += part.numbers
        weights += part.weights
        starts.extend(len(places) + start for start in part.starts[1:])
        places += part.places
    return Postings(numbers, weights, starts, bytes(places))


def read_postings(reader: Any, term: str) -> Postings:
    """All postings of a term, of a Whoosh reader."""
    numbers, weights, sizes, places = array("I"), array("f"), array("I"), bytearray()
    matcher = reader.postings(BODY, term)
    while matcher.is_active():
        matcher._read_data()
        steps, _, (data,) = matcher._data
        end = len(steps) * weights.itemsize
        numbers.extend(accumulate(steps))
        weights.frombytes(data[:end])
        sizes.frombytes(data[end : 2 * end])
        places += data[2 * end :]
        matcher._next_block()
    return Postings(numbers, weights, array("I", accumulate(sizes, initial=0)), bytes(places))


def adjacent(places: list[array[int]]) -> int:
    """How often terms with these places follow each other, with at most one word between two of them."""
    ends = set(places[0])
    for later in places[1:]:
        ends = {place for place in later if place - 1 in ends or place - 2 in ends}
    return len(ends)


def schema() -> fields.Schema:
    return fields.Schema(**{BODY: fields.TEXT(), "document": fields.STORED})


class _FieldWriter(whoosh3.W3FieldWriter):  # type: ignore[misc]
    """Writes the postings of a term as blocks, in Whoosh's format but without its posting by posting."""

    def add_postings(self, schema: fields.Schema, _: object, terms: Iterable[tuple[bytes, Term]]) -> None:
        self.start_field(BODY, schema[BODY])
        field = pack_ushort(self._fieldid)
        start = self._postfile.tell()
        for term, (numbers, weights, places) in terms:
            block = _blocks(numbers, weights, places)
            self._postfile.write(block)
            count = len(numbers)
            info = whoosh3.W3TermInfo._struct.pack(False, count, count, 0, 0, 0, numbers[0], numbers[-1])
            self._tindex.add(field + term, info + pack_long(start) + pack_int(len(block)))
            start += len(block)
        self.finish_field()


def _blocks(numbers: array[int], weights: array[float], places: list[bytes]) -> bytes:
    """The postings of one term as `W3LeafMatcher` reads them; a block's only value holds weights, sizes and places."""
    count = len(numbers)
    compression = 3 if count > 8 else 0  # most terms are rare, and not worth its time
    pieces = [whoosh3.WHOOSH3_HEADER_MAGIC]
    for at in range(0, count, BLOCK):
        some, values = numbers[at : at + BLOCK], places[at : at + BLOCK]
        sizes = array("I", map(len, values))
        value = b"".join((weights[at : at + BLOCK].tobytes(), sizes.tobytes(), *values))
        data = dumps((tuple(delta_encode(some)), None, (value,)), 3)  # 2 would write bytes as text
        if compression:
            data = compress(data, compression)
        info = dumps((len(some), some[-1], 0, compression, 0, 0), 2)  # no lengths or weights: we do not use its scorers
        length = len(info) + len(data)
        pieces += (pack_int(length if at + BLOCK < count else -length), info, data)
    return b"".join(pieces)


class Codec(whoosh3.W3Codec):  # type: ignore[misc]
    length_stats = False  # per block, for scorers that we do not use

    def field_writer(self, storage: Storage, segment: object) -> _FieldWriter:
        return _FieldWriter(self, storage, segment)
