"""Makes untrusted text safe to show.

Logs, file names, titles of private entries and exception messages may contain characters that a terminal executes, that
reverse or hide text, or that only a model reads. `printable` shows them as Python would write them: `\\x1b`.
"""

from __future__ import annotations

import re

# Tabs and newlines stay, and so do the joiners of emoji and of Persian.
HAZARDS = (
    r"\x00-\x08\x0b-\x1f\x7f-\x9f"  # a terminal executes these
    r"\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # break lines or change the direction of text
    r"\u00ad\u200b\u2060-\u2064\ufeff\ufff9-\ufffb"  # invisible
    r"\U000e0000-\U000e0fff"  # invisible: tags and further variants
    r"\ud800-\udfff"  # not characters
)
_HAZARD = re.compile(f"[{HAZARDS}]")


def printable(text: str) -> str:
    """The text, with every hazard as an escape sequence."""
    return text if text.isprintable() else _HAZARD.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match.group().encode("unicode_escape").decode("ascii")
