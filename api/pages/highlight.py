"""Highlights words of a text with `<mark>`."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

MARKED = Markup("<mark>{}</mark>")


def highlighted(text: str, words: Iterable[str]) -> Markup:
    """The text as HTML with these words in `<mark>`, ignoring case; the longest match wins."""
    patterns = sorted((word for word in words if word.strip()), key=len, reverse=True)
    if not patterns:
        return escape(text)
    pieces = re.split(f"({'|'.join(map(re.escape, patterns))})", text, flags=re.IGNORECASE)
    return Markup("").join(MARKED.format(piece) if i % 2 else escape(piece) for i, piece in enumerate(pieces))
