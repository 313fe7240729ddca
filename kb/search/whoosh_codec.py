"""Postings as kb stores them in a Whoosh index: columns of bytes that are fast to write and read.

Whoosh's matchers need a call for each posting, which was slow with ten thousand entries. Some attributes used here and
in `kb.search.index_writer` have no public names; Whoosh 2.7.4 is pinned exactly (decision 0003).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Container, Iterable, Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, NamedTuple
from zlib import compress, crc32, decompress

from whoosh import fields
from whoosh.codec import whoosh3
from whoosh.filedb.filestore import Storage
from whoosh.filedb.filetables import HashWriter, OrderedHashWriter
from whoosh.system import pack_int, pack_ushort
from whoosh.util.numlists import GrowableArray

BODY = "body"
POSTINGS = Struct("=I?")  # before the columns of a term: number of postings, whether they are compressed
MOST_UNCOMPRESSED = 8  # postings; most terms are rare, and not worth compressing
TERM_INFO = Struct(whoosh3.W3TermInfo._struct.format + "qi")  # with the place of the postings

Pieces = list[bytes]  # the postings of a term by document: number, weight, places
NUMBER, HEAD = 4, 8  # bytes of a piece up to the end of the number, and up to the places


class Postings(NamedTuple):
    """The documents of a term or phrase in ascending order, with its weight and its places in each.

    The places in document `at` are the 32-bit numbers from byte `starts[at]` to byte `starts[at + 1]`.
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
        """The same postings with `by` added to the document numbers."""
        return self._replace(numbers=array("I", (number + by for number in self.numbers))) if by else self


def joined(parts: Sequence[Postings]) -> Postings:
    """Concatenate postings of ascending ranges of documents."""
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
    """All postings of a term in a Whoosh reader."""
    start, (length,) = reader.term_info(BODY, term).extent()  # Whoosh leaves the length as a tuple
    stored = reader._terms._postfile.get(start, length)
    count, is_compressed = POSTINGS.unpack_from(stored)
    data = stored[POSTINGS.size :]
    columns = memoryview(decompress(data) if is_compressed else data)
    numbers, weights, sizes = array("I"), array("f"), array("I")
    width = count * NUMBER
    numbers.frombytes(columns[:width])
    weights.frombytes(columns[width : 2 * width])
    sizes.frombytes(columns[2 * width : 3 * width])
    return Postings(numbers, weights, array("I", accumulate(sizes, initial=0)), bytes(columns[3 * width :]))


def adjacent(places: list[array[int]]) -> int:
    """How often terms with these places follow each other, with at most one word between two of them."""
    ends = set(places[0])
    for later in places[1:]:
        ends = {place for place in later if place - 1 in ends or place - 2 in ends}
    return len(ends)


def schema() -> fields.Schema:
    return fields.Schema(**{BODY: fields.TEXT(), "document": fields.STORED})


class _TermIndex(OrderedHashWriter):  # type: ignore[misc]
    """Whoosh's table of terms, with one write per term, hashed by CRC-32 because MD5 takes ten times as long."""

    def __init__(self, file: Any) -> None:
        HashWriter.__init__(self, file, hashtype=1)
        self.index = GrowableArray("I")
        self._end: int = file.tell()

    def add(self, key: bytes, value: bytes) -> None:
        """Add a term. Keys must come in ascending order."""
        row = b"".join((pack_int(len(key)), pack_int(len(value)), key, value))
        self.dbfile.write(row)
        hashed = crc32(key)
        self.buckets[hashed & 255].append((hashed, self._end))
        self.index.append(self._end)
        self._end += len(row)


class _FieldWriter(whoosh3.W3FieldWriter):  # type: ignore[misc]
    """Writes all postings of a term at once, in our own format, instead of one by one as Whoosh does."""

    _tindex: Any

    def __init__(self, codec: whoosh3.W3Codec, storage: Storage, segment: object) -> None:
        super().__init__(codec, storage, segment)
        self._tindex.close()  # Whoosh's table, still empty
        self._tindex = _TermIndex(self._create_file(codec.TERMS_EXT))
        self._tindex.extras["fieldmap"] = self._fieldmap

    def add_postings(self, schema: fields.Schema, _: object, terms: Iterable[tuple[bytes, Pieces]]) -> None:
        self.start_field(BODY, schema[BODY])
        field = pack_ushort(self._fieldid)
        start = self._postfile.tell()
        for term, pieces in terms:
            count = len(pieces)
            is_compressed = count > MOST_UNCOMPRESSED
            columns = _columns(pieces)
            stored = POSTINGS.pack(count, is_compressed) + (compress(columns, 1) if is_compressed else columns)
            self._postfile.write(stored)
            info = TERM_INFO.pack(False, count, count, 0, 0, 0, 0, 0, start, len(stored))  # Whoosh's scorers are unused
            self._tindex.add(field + term, info)
            start += len(stored)
        self.finish_field()


def _columns(pieces: Pieces) -> bytes:
    """The numbers of all pieces, then the weights, the sizes of the places, and the places."""
    heads = array("I", b"".join([piece[:HEAD] for piece in pieces]))
    places = [piece[HEAD:] for piece in pieces]
    return b"".join((heads[::2], heads[1::2], array("I", map(len, places)), *places))


class Codec(whoosh3.W3Codec):  # type: ignore[misc]
    length_stats = False  # per block, for scorers that we do not use

    def field_writer(self, storage: Storage, segment: object) -> _FieldWriter:
        return _FieldWriter(self, storage, segment)
