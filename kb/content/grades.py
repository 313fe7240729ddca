"""The grades of claims, and the marks that state them in the text of an entry."""

from __future__ import annotations

import re
from enum import StrEnum


class Grade(StrEnum):
    """How a claim is known. `[probe gloo]` has no grade here: the probe is its own reference."""

    THREAD = "read in thread"
    SOURCE = "read in source"
    CLAIMED = "claimed"
    INFERRED = "inferred"


MARK = re.compile(
    r"\[(?:(?P<inferred>inferred)|(?P<probe>probe)(?: (?P<experiment>[a-z0-9][a-z0-9.-]*))?"
    r"|(?P<word>source|thread|claimed) (?P<number>[1-9]\d*))\]"
)
LIKE_A_MARK = re.compile(
    r"\[(?:[a-z]+|(?i:probe|inferred|source|thread|claimed)s?(?: [a-z][a-z0-9.-]*)?)(?: ?[#\d, ]+)?\]"
)
GRADES = {"source": Grade.SOURCE, "thread": Grade.THREAD, "claimed": Grade.CLAIMED}  # by the word of a numbered mark


def without_marks(text: str) -> str:
    """The text without grade marks, for readers."""
    return re.sub(f" ?{MARK.pattern}", "", text)
