"""Where literals were found, line by line: of an overlong line the text around each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

REACH = 2048  # bytes on either side of a literal that are seen of an overlong line
NEAR = 1024  # of those, what every literal seen in it has on its right
PIECE = re.compile(rb"[^\r\n]{1,%d}" % (2 * REACH))
SHARED = 256  # bytes that such pieces share
LINE_ENDS = b"\r\n"

Hit = tuple[int, int, int]  # which literal, start, end


class Found(NamedTuple):
    """A line, or a piece of an overlong one: `first` to `last`, whether that is where it starts, and its literals."""

    first: int
    last: int
    is_start: bool
    literals: set[int]


def grouped(
    data: bytes, hits: Iterable[Hit], offset: int, after: int, is_skipped: Callable[[int], bool]
) -> Iterator[Found]:
    """Hits, which count from `offset` and come by their end, by line; those that end behind `after`.

    A carriage return ends a line too: a progress bar is many.
    """
    returns = b"\r" in data
    first = near = -1
    found: Found | None = None
    for literal, start, end in hits:
        if is_skipped(literal):
            continue
        start += offset
        end += offset
        if end <= after:
            continue
        if found and end <= near and start >= first:
            found.literals.add(literal)
            continue
        if found:
            yield found
        found = _line_around(data, start, end, literal, returns=returns)
        first, near = found.first, found.last
        if near < len(data) and data[near] not in LINE_ENDS:
            near = max(end, near - NEAR)
    if found:
        yield found


def every(data: bytes, start: int, end: int) -> Iterator[Found]:
    """All lines, as if each held a literal."""
    for piece in PIECE.finditer(data, start, end):
        first = piece.start()
        is_start = first == 0 or data[first - 1] in LINE_ENDS
        yield Found(first if is_start else max(0, first - SHARED), piece.end(), is_start, set())


def _line_around(data: bytes, start: int, end: int, literal: int, *, returns: bool) -> Found:
    low, high = max(0, start - REACH), end + REACH
    first = data.rfind(b"\n", low, start) + 1
    last = data.find(b"\n", end, high)
    if returns:
        first = max(first, data.rfind(b"\r", low, start) + 1)
        ended = data.find(b"\r", end, high if last < 0 else last)
        last = ended if ended >= 0 else last
    is_start = bool(first) or low == 0
    return Found(first or low, last if last >= 0 else min(high, len(data)), is_start, {literal})
