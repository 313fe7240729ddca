"""Turns rows of a table of metrics into lines that name each value: `step 20 loss 0.8957 tok/s 6112`.

A header such as `step | loss | lr` is printed once, often thousands of lines above its rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from kb.diagnose.story.lines import StoryLine
from kb.diagnose.story.progress import has_progress

Header = tuple[str, ...]

LEAST_COLUMNS, MOST_COLUMNS = 3, 24
LEAST_NAMES = 2  # columns that name a counter or a metric
LONGEST_HEADER = 400  # characters
DIGIT = re.compile(r"\d")
GAP = re.compile(r"\s*[|│]\s*|\s{2,}")
VALUE = re.compile(r"[-+]?(?:\d[\d.,]*(?:[eE][-+]?\d+)?%?|nan|inf)(?:/\d+)?", re.IGNORECASE)


def read_tables(lines: Iterable[StoryLine]) -> Iterator[StoryLine]:
    """All lines; the messages of rows name their values."""
    headers: dict[tuple[str, int | None], Header] = {}
    for line in lines:
        key = line.source, line.rank
        if header := _header(line.message):
            headers[key] = header
        elif headers and (names := headers.get(key)):
            line = line._replace(message=_row(names, line.message))
        yield line


def _header(text: str) -> Header:
    """The names of the columns; empty if the line is not a header."""
    if len(text) > LONGEST_HEADER or DIGIT.search(text):
        return ()
    cells = _cells(text)
    if not LEAST_COLUMNS <= len(cells) <= MOST_COLUMNS:
        return ()
    return cells if sum(has_progress(f"{cell} 1") for cell in cells) >= LEAST_NAMES else ()


def _row(names: Header, text: str) -> str:
    cells = _cells(text)
    if len(cells) != len(names) or not all(map(VALUE.fullmatch, cells)):
        return text
    return " ".join(f"{name} {cell}" for name, cell in zip(names, cells, strict=True))


def _cells(text: str) -> Header:
    return tuple(GAP.split(text.strip(" |│\t")))
