"""Words within a text, marked."""

from __future__ import annotations

import re
from collections.abc import Iterable

from markupsafe import Markup, escape

MARKED = Markup("<mark>{}</mark>")


def highlighted(text: str, words: Iterable[str]) -> Markup:
    """The text as HTML with these words in `<mark>`, in upper or lower case alike; a longer one wins."""
    wanted = sorted((word for word in words if word.strip()), key=len, reverse=True)
    if not wanted:
        return escape(text)
    pieces = re.split(f"({'|'.join(map(re.escape, wanted))})", text, flags=re.IGNORECASE)
    return Markup("").join(
        Markup("<mark>{}</mark>").format(piece) if i % 2 else escape(piece) for i, piece in enumerate(pieces)
    )
