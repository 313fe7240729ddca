"""The search index, open for reading: one or more segments, searched as one.

Postings are scored here; Whoosh's `Searcher` and `QueryParser` are not used (decision 0003).
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from heapq import nlargest
from itertools import chain
from math import log
from operator import itemgetter
from typing import Any, Self

from kb.search.segment import Segment, Signature, Tables
from kb.search.whoosh_codec import Postings, adjacent, joined

K1, B = 8.0, 0.75  # saturation, late because one headline weighs 3; how much a long entry is discounted
MOST_SPELLINGS = 3  # per term


class Index:
    """One generation, open for reading. Document numbers are only meaningful within it.

    `ids` maps the number of every document to the id of its entry, in the order of the ids. `numbers` leaves out
    withdrawn entries, which are stored but never found.
    """

    def __init__(self, segments: Sequence[Segment], tables: Tables) -> None:
        self._segments = tuple(segments)
        self._ends = [segment.end for segment in segments]
        rows = chain.from_iterable(segment.ids() for segment in segments)
        self.ids = dict(sorted(rows, key=itemgetter(1)))
        withdrawn = frozenset[int]().union(*(segment.withdrawn() for segment in segments))
        self.numbers = {number: entry_id for number, entry_id in self.ids.items() if number not in withdrawn}
        self._norms = self._length_norms()
        self.causes: list[tuple[str, str]] = [(cause, effect) for cause, effect in tables["causes"]]
        self.masks: list[tuple[str, str]] = [(seen, hidden) for seen, hidden in tables["masks"]]
        self.problems: list[str] = tables["problems"]
        self.declared = dict(chain.from_iterable(segment.declared() for segment in segments))
        self.cues = {tuple(key): values for key, values in tables["cues"]}
        self.out_of_scope: int = tables["out_of_scope"]
        self.synonyms = {tuple(key): tuple(map(tuple, others)) for key, others in tables["synonyms"]}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Data that was read stays usable."""
        for segment in self._segments:
            segment.close()

    def __len__(self) -> int:
        return len(self.ids)

    def _length_norms(self) -> dict[int, float]:
        """What the length of each document adds to the saturation of a weight: K1 for an entry of average length."""
        total = sum(length for segment in self._segments for _, length in segment.lengths())
        average = float(total) / max(1, len(self))
        lengths = chain.from_iterable(segment.rounded_lengths() for segment in self._segments)
        return {number: K1 * (1 - B + B * length / average) for number, length in lengths}

    def has(self, term: str) -> bool:
        return self._frequency(term) > 0

    def idf(self, term: str) -> float:
        """How well a term tells entries apart: 1 if all have it, growing with the log of how few do."""
        return 1 + log(len(self) / (self._frequency(term) + 1))

    def scores(self, terms: tuple[str, ...], among: frozenset[int] | None = None) -> dict[int, float]:
        """The BM25 of all documents (or those `among`) that have the term, or the terms one after the other.

        Okapi BM25 (Robertson and Zaragoza 2009); the weights of fields are added up before they saturate (BM25F).
        """
        if not all(map(self.has, terms)):
            return {}
        rows: Iterable[tuple[int, float]]
        if len(terms) > 1:
            rows = self._phrase(terms) if among is None else self._phrase_among(terms, among)
        elif among is None:
            rows = zip(*self._postings(terms[0])[:2], strict=True)
        else:
            numbers, weights, *_ = self._postings(terms[0])
            rows = ((number, weights[bisect_left(numbers, number)]) for number in among.intersection(numbers))
        norms = self._norms
        factor = sum(map(self.idf, terms)) * (K1 + 1)
        return {number: factor * weight / (weight + norms[number]) for number, weight in rows}

    @lru_cache(4096)  # noqa: B019
    def champions(self, terms: tuple[str, ...], count: int) -> Mapping[int, float]:
        """The highest `count` of `scores`."""
        scores = self.scores(terms)
        return dict(nlargest(count, scores.items(), itemgetter(1))) if len(scores) > count else scores

    @lru_cache(1 << 14)  # noqa: B019  # an Index lives as long as its process or request handler
    def _frequency(self, term: str) -> int:
        return sum(segment.frequency(term) for segment in self._segments)

    @lru_cache(2048)  # noqa: B019
    def _postings(self, term: str) -> Postings:
        """The postings of a term, cached because common terms, which have long lists, are asked for again."""
        return joined([segment.postings(term) for segment in self._segments if segment.frequency(term)])

    @lru_cache(256)  # noqa: B019
    def _phrase(self, terms: tuple[str, ...]) -> list[tuple[int, float]]:
        return self._phrase_among(terms, frozenset(self._postings(terms[0]).numbers))

    def _phrase_among(self, terms: tuple[str, ...], among: frozenset[int]) -> list[tuple[int, float]]:
        """Documents in which the terms follow each other; the term with the lowest weight there decides."""
        postings = [self._postings(term) for term in terms]
        shared = among
        for posting in sorted(postings, key=lambda posting: len(posting.numbers)):
            shared = shared.intersection(posting.numbers)
        rows = []
        for number in sorted(shared):
            weighted = [posting.places_in(number) for posting in postings]
            ends = adjacent([places for _, places in weighted])
            if ends:
                rows.append((number, min(weight / len(places) for weight, places in weighted) * ends))
        return rows

    def follows(self, first: str, second: str, number: int) -> bool:
        """Whether a document has two terms one after the other, or with one word between them."""
        return bool(self.has(first) and self.has(second) and self._phrase_among((first, second), frozenset({number})))

    def document(self, number: int) -> dict[str, Any]:
        """The stored document."""
        document: dict[str, Any] = json.loads(self._stored(number))
        return document

    @lru_cache(256)  # noqa: B019
    def _stored(self, number: int) -> str:
        return self._segments[bisect_right(self._ends, number)].document(number)

    def documents(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every document by number, including withdrawn entries."""
        return ((number, self.document(number)) for number in self.ids)

    @cached_property
    def facets(self) -> dict[int, dict[str, Any]]:
        """The fields by which entries are filtered, without withdrawn entries."""
        rows = dict(chain.from_iterable(segment.facets() for segment in self._segments))
        return {number: rows[number] for number in self.numbers}

    @cached_property
    def surfaces(self) -> dict[str, list[str]]:
        """Plain English terms, each with its most common spellings."""
        counts: Counter[str] = Counter()
        terms: dict[str, str] = {}
        for spelling, count, term in chain.from_iterable(segment.spellings() for segment in self._segments):
            counts[spelling] += count
            terms[spelling] = term
        surfaces: dict[str, list[str]] = {}
        for spelling, _ in counts.most_common():
            surfaces.setdefault(terms[spelling], []).append(spelling)
        is_stale = any(segment.has_dead for segment in self._segments)
        return {
            term: spellings[:MOST_SPELLINGS] for term, spellings in surfaces.items() if not is_stale or self.has(term)
        }

    @cached_property
    def signatures(self) -> list[Signature]:
        """The signatures of all entries that are not withdrawn, by id."""
        return _by_id(segment.signatures for segment in self._segments)

    def signatures_in(self, text: str) -> list[Signature]:
        """The signatures that may match a text."""
        return _by_id(segment.signatures_in(text) for segment in self._segments)


def _by_id(lists: Iterable[list[Signature]]) -> list[Signature]:
    return sorted(chain.from_iterable(lists), key=itemgetter("id"))
