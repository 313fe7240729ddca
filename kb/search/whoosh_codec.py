"""Postings as kb keeps them in a Whoosh index: whole blocks of bytes, quick to read.

A call for each posting, as Whoosh's matchers offer it, is what made ten thousand entries slow. Some attributes used
here and in `kb.search.index_writer` have no public names; Whoosh 2.7.4 is pinned exactly (decision 0003).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any, NamedTuple

from whoosh import fields
from whoosh.codec import whoosh3
from whoosh.filedb.filestore import Storage

from kb.search import tokenizer

BODY = "body"
BLOCK = 512  # postings that Whoosh keeps, and reads, together

Term = tuple["array[int]", "array[float]", list[bytes]]  # its postings: documents, weights, places


class Postings(NamedTuple):
    """Documents of a term or phrase in ascending order, the weight it has in each, and where a term stands there.

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


def read(reader: Any, term: str) -> Postings:
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


class Body(fields.TEXT):  # type: ignore[misc]  # Whoosh is untyped
    """Whoosh's view of `analysis.terms`. A value is a list of (weight, text); a place is four bytes, no pickle."""

    def index(self, value: list[tuple[float, str]], **_: object) -> Iterator[tuple[bytes, int, float, bytes]]:
        """(term, how often, weights added up, places) of each term of a document."""
        places: dict[str, list[int]] = defaultdict(list)
        weights: dict[str, float] = defaultdict(float)
        offset = 0
        for weight, text in value:
            last = 0
            for term, position, *_rest in tokenizer.terms(text):
                places[term].append(offset + position)
                weights[term] += weight
                last = position + 1
            offset += last + 10  # no phrase reaches over the border of two parts
        for term, at in places.items():
            yield term.encode(), len(at), weights[term], array("I", at).tobytes()


def schema() -> fields.Schema:
    return fields.Schema(**{BODY: Body(), "document": fields.STORED})


class _FieldWriter(whoosh3.W3FieldWriter):  # type: ignore[misc]
    """Writes the postings of a term as blocks: weights and places as one piece of bytes, quick to read.

    The attributes of its writer are private; 2.7.4 is pinned exactly.
    """

    def add_postings(self, schema: fields.Schema, _: object, terms: Iterable[tuple[bytes, Term]]) -> None:
        self.start_field(BODY, schema[BODY])
        for term, (numbers, weights, places) in terms:
            self.start_term(term)
            self._postwriter._compression = 3 if len(numbers) > 8 else 0  # most terms are rare, and not worth its time
            for at in range(0, len(numbers), BLOCK):
                if at:
                    self._postwriter._write_block()
                some = places[at : at + BLOCK]
                sizes = array("I", map(len, some))
                self._postwriter._ids = numbers[at : at + BLOCK]
                self._postwriter._weights = array("f", [1.0]) * len(some)
                self._postwriter._values = [weights[at : at + BLOCK].tobytes() + sizes.tobytes() + b"".join(some)]
            self.finish_term()
        self.finish_field()


class Codec(whoosh3.W3Codec):  # type: ignore[misc]
    length_stats = False  # per block, for scorers that we do not use

    def field_writer(self, storage: Storage, segment: object) -> _FieldWriter:
        return _FieldWriter(self, storage, segment)
