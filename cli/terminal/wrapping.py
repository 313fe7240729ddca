"""Lines for a terminal: broken between words and between Chinese characters, never within a word, an id or an address.

A word that is wider than the line overflows it: the terminal still shows all of it, and it can be copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from shutil import get_terminal_size
from unicodedata import east_asian_width

WIDEST = 110  # columns of prose; longer lines are hard to read
WIDE = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff01-\uff60"  # Chinese, its punctuation, and its neighbours
OPENING = "([“‘（《「『【"  # never ends a line
CLOSING = r"[”’)\],;:!?、，。；：！？）》」』】]|\.(?![A-Za-z0-9])"  # never begins one; `.pth` does
CHUNK = re.compile(rf"(?P<space>\s+)|[{re.escape(OPENING)}]*(?:[{WIDE}]|[^\s{WIDE}]+)(?:{CLOSING})*")


def columns() -> int:
    """The width of prose: that of the terminal, which `COLUMNS` overrides, or 80 where there is none."""
    return min(get_terminal_size().columns, WIDEST)


def cells(text: str) -> int:
    """The columns that a text takes: two for a Chinese character."""
    return len(text) if text.isascii() else sum(1 + (east_asian_width(character) in "WF") for character in text)


def breaks(text: str, width: int) -> Iterator[tuple[int, int]]:
    """Start and end of each line; the space between two lines belongs to neither. A line end in the text stays one."""
    start = end = used = 0
    for chunk in CHUNK.finditer(text):
        if chunk["space"]:
            continue
        size, gap = cells(chunk[0]), chunk.start() - end
        if end and (used + gap + size > width or "\n" in text[end : chunk.start()]):
            yield start, end
            start, used, gap = chunk.start(), 0, 0
        end, used = chunk.end(), used + gap + size
    yield start, end


def hanging(text: str, indent: int) -> str:
    """A text whose first line begins at the column `indent` of what is there already, and the others below it."""
    text = re.sub(r"\s", " ", text)
    lines = [text[start:end] for start, end in breaks(text, columns() - indent)]
    return f"\n{' ' * indent}".join(lines)
