"""Groups the hits of literals by line, or in overlong lines by the text around each hit."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

REACH = 2048  # bytes of an overlong line on either side of a literal that are examined
NEAR = 1024  # bytes of `REACH` that must follow each literal of a span
PIECE = re.compile(rb"[^\r\n]{1,%d}" % (2 * REACH))
OVERLAP = 256  # bytes that consecutive pieces share
LINE_ENDS = b"\r\n"

Hit = tuple[int, int, int]  # which literal, start, end


class LineSpan(NamedTuple):
    """The bytes `first` to `last`: a line, or a piece of an overlong one. `is_start`: the line starts at `first`."""

    first: int
    last: int
    is_start: bool
    literals: set[int]


def spans_of_hits(
    data: bytes, hits: Iterable[Hit], offset: int, after: int, is_skipped: Callable[[int], bool]
) -> Iterator[LineSpan]:
    """The lines with hits that end after position `after`. Hits are relative to `offset` and sorted by their end.

    A carriage return ends a line too: a progress bar consists of many lines.
    """
    has_returns = b"\r" in data
    first = near = -1
    span: LineSpan | None = None
    for literal, start, end in hits:
        if is_skipped(literal):
            continue
        start += offset
        end += offset
        if end <= after:
            continue
        if span and end <= near and start >= first:
            span.literals.add(literal)
            continue
        if span:
            yield span
        span = _line_around(data, start, end, literal, has_returns=has_returns)
        first, near = span.first, span.last
        if near < len(data) and data[near] not in LINE_ENDS:
            near = max(end, near - NEAR)
    if span:
        yield span


def spans_of_lines(data: bytes, start: int, end: int) -> Iterator[LineSpan]:
    """All lines; overlong ones in pieces."""
    for piece in PIECE.finditer(data, start, end):
        first = piece.start()
        is_start = first == 0 or data[first - 1] in LINE_ENDS
        yield LineSpan(first if is_start else max(0, first - OVERLAP), piece.end(), is_start, set())


def _line_around(data: bytes, start: int, end: int, literal: int, *, has_returns: bool) -> LineSpan:
    low, high = max(0, start - REACH), end + REACH
    first = data.rfind(b"\n", low, start) + 1
    last = data.find(b"\n", end, high)
    if has_returns:
        first = max(first, data.rfind(b"\r", low, start) + 1)
        return_at = data.find(b"\r", end, high if last < 0 else last)
        last = return_at if return_at >= 0 else last
    is_start = bool(first) or low == 0
    return LineSpan(first or low, last if last >= 0 else min(high, len(data)), is_start, {literal})
