"""What a diagnosis rests on: lines, each with where it was read."""

from __future__ import annotations

from dataclasses import dataclass

LONGEST_SHOWN = 400  # characters of a line that are kept


@dataclass(frozen=True, slots=True)
class Line:
    """A line of evidence.

    `source` is the file as the user named it, `number` its line counted from 1, or 0 when the text was derived from
    a dump and not read from a line. `rank` and `time` (seconds since the epoch, or since the start of the log when it
    gives no date) are None where nothing says them. `text` is free of colours and cut to `LONGEST_SHOWN` characters.
    """

    source: str
    number: int
    text: str
    rank: int | None = None
    time: float | None = None
