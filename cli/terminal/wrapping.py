"""Line breaking for a terminal: between words and Chinese characters, never within a word, an id or an address.

A word that is wider than the line overflows: the terminal still shows all of it, and it can be copied.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from shutil import get_terminal_size
from unicodedata import east_asian_width

WIDEST = 110  # columns of prose; longer lines are hard to read
OPENING = "([“‘（《「『【"  # never ends a line
WORD = re.compile(r"[^\s`]*`(?:(?:kb |--)[^`\n]*|[^`\n]{1,40})`\S*|\S+")  # a command stays whole, to be copied
CLOSING = "”’)],.;:!?、，。；：！？）》」』】"  # never begins a line


def columns() -> int:
    """The width of prose: from `COLUMNS`, or else from the terminal, or 80 without a terminal."""
    return min(get_terminal_size().columns, WIDEST)


def cells(text: str) -> int:
    """The number of columns of a text: two for a Chinese character."""
    return len(text) if text.isascii() else sum(1 + _is_wide(character) for character in text)


def shortened(text: str, width: int) -> str:
    """A text cut to at most `width` columns, between words if possible."""
    if cells(text) <= width:
        return text
    kept = text[:width]
    while cells(kept) >= width:
        kept = kept[:-1]
    return f"{kept.rsplit(' ', 1)[0] if ' ' in kept else kept}…"


def padded(text: str, width: int) -> str:
    """A text padded to this width; a wider text is unchanged."""
    return text + " " * (width - cells(text))


def breaks(text: str, width: int) -> Iterator[tuple[int, int]]:
    """Start and end of each line, without the space between lines. A line end in the text is kept."""
    start = end = used = 0
    for begin, stop in _chunks(text):
        size, gap = cells(text[begin:stop]), begin - end
        if end and (used + gap + size > width or "\n" in text[end:begin]):
            yield start, end
            start, used, gap = begin, 0, 0
        end, used = stop, used + gap + size
    yield start, end


def _chunks(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of each unbreakable piece: a word, a short command, or a Chinese character with its punctuation.

    Not one regular expression, because compiling it takes a fifth of the time of a search.
    """
    for word in WORD.finditer(text):
        start, end = word.span()
        if not word[0].isascii():
            for at in range(start + 1, end):
                before, character, after = text[at - 1], text[at], text[at + 1 : at + 2]
                is_closing = character in CLOSING and not (character == "." and after.isascii() and after.isalnum())
                if (_is_wide(before) or _is_wide(character)) and before not in OPENING and not is_closing:
                    yield start, at
                    start = at
        yield start, end


def _is_wide(character: str) -> bool:
    return east_asian_width(character) in "WF"


def hanging(text: str, indent: int) -> str:
    """A text whose later lines are indented to the column `indent`, where its first line begins."""
    text = re.sub(r"\s", " ", text)
    lines = [text[start:end].rstrip() for start, end in breaks(text, columns() - indent)]
    return f"\n{' ' * indent}".join(lines)
