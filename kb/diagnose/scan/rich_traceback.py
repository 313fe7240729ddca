"""Turns tracebacks that rich drew in boxes into the form that Python prints."""

from __future__ import annotations

import re

FRAME = re.compile(r"^[│|] *(?:❱ *)?(\S+\.py):(\d+) in (\w+) *[│|]?$", re.MULTILINE)
SOURCE = re.compile(r"^[│|] *(?:❱ +)?\d+ +[│|]? ?(.*?) *[│|]$", re.MULTILINE)
BORDER = re.compile(r"^[╭╰][─ ].*$", re.MULTILINE)


def unboxed(text: str) -> str:
    """Return `text` with frames as `File "x.py", line 3, in f`, without borders and decoration of source lines."""
    if "│" not in text and "╭" not in text:
        return text
    text = FRAME.sub(r'  File "\1", line \2, in \3', text)
    return BORDER.sub("", SOURCE.sub(r"    \1", text))
