"""Postings on their way into the index, by term. Whoosh's own pool pickles each of them and compares it twice.

A posting is stored as one bytes object. An array for each term and column would be slower and larger, since most terms
are rare.
"""

from __future__ import annotations

import marshal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from heapq import merge
from itertools import accumulate, groupby
from operator import itemgetter
from struct import Struct
from typing import IO, Any

from kb.search.tokenizer import runs
from kb.search.whoosh_codec import Pieces

MOST_HELD = 1 << 20  # postings in memory during a build: about 100 MB
BETWEEN_PARTS = 10  # places left out, so that no phrase spans two parts


class PostingsPool:
    """Takes documents in order, and writes every `MOST_HELD` postings to a temporary file, sorted by term."""

    def __init__(self) -> None:
        self._terms: dict[str, Pieces] = {}
        self._count = 0
        self._files: list[IO[bytes]] = []

    def add(self, number: int, parts: list[tuple[float, str]]) -> int:
        """Add a document, a list of (weight, text). Returns its length in terms."""
        terms = self._terms
        document = _weights_and_places(parts)
        for term, row in document.items():
            piece = _packing(len(row))(number, *row)
            pieces = terms.get(term)
            if pieces is None:
                terms[term] = [piece]
            else:
                pieces.append(piece)
        self._count += len(document)
        if self._count >= MOST_HELD:
            self._spill()
        return sum(map(len, document.values())) - len(document)

    def iter_postings(self) -> Iterator[tuple[bytes, Pieces]]:
        """The terms in order, each with all of its postings in the order of the documents."""
        rest = ((term, self._terms.pop(term)) for term in sorted(self._terms))
        if not self._files:
            return ((term.encode(), pieces) for term, pieces in rest)
        merged = groupby(merge(*map(_read, self._files), rest, key=itemgetter(0)), itemgetter(0))
        return ((term.encode(), [piece for _, pieces in parts for piece in pieces]) for term, parts in merged)

    def cleanup(self) -> None:
        """Close the temporary files; Whoosh's writer calls this."""
        for file in self._files:
            file.close()

    def _spill(self) -> None:
        file = tempfile.TemporaryFile()  # noqa: SIM115  # closed by cleanup
        self._files.append(file)
        for term in sorted(self._terms):
            marshal.dump((term, self._terms[term]), file)
        file.seek(0)
        self._terms, self._count = {}, 0


@cache
def _packing(length: int) -> Callable[..., bytes]:
    """The function that packs a document's number and a row of this length."""
    return Struct(f"=If{length - 1}I").pack


def _weights_and_places(parts: list[tuple[float, str]]) -> dict[str, list[Any]]:
    """For each term of a document a list: the sum of its weights in the parts, then its places.

    One dictionary takes four fifths of the time of two.
    """
    document: dict[str, list[Any]] = {}
    start = 0
    for weight, text in parts:
        end = start
        surfaces = list(runs(text))
        for (forms, _), here in zip(surfaces, accumulate(map(itemgetter(1), surfaces), initial=start), strict=False):
            for term, offset in forms:
                row = document.get(term)
                if row is None:
                    document[term] = [weight, here + offset]
                else:
                    row[0] += weight
                    row.append(here + offset)
            if forms:
                end = here + forms[-1][1] + 1
        start = end + BETWEEN_PARTS
    return document


def _read(file: IO[bytes]) -> Iterator[tuple[str, Pieces]]:
    with suppress(EOFError):
        while True:
            yield marshal.load(file)  # noqa: S302  # our own file  # nosec B302
