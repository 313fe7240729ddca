"""Text of others, made safe to show.

Logs, names of files, titles of private entries and messages of exceptions may contain what a terminal executes, what
reverses or hides text, and tags that only a model reads. `printable` shows it as Python would write it: `\\x1b`.
"""

from __future__ import annotations

import re

# Tabs and line ends stay, and the joiners of emoji and of Persian.
HAZARDS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # what a terminal executes
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # breaks lines or changes the direction of text
    r"\u00ad\u200b\u2060-\u2064\ufeff\ufff9-\ufffb"  # invisible
    r"\U000e0000-\U000e0fff"  # invisible: tags and further variants
    r"\ud800-\udfff"  # no characters
)
_HAZARD = re.compile(f"[{HAZARDS}]")


def printable(text: str) -> str:
    """The text with every hazard as an escape sequence."""
    return text if text.isprintable() else _HAZARD.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
