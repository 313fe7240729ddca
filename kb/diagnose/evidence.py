"""What a diagnosis rests on: lines, each with where it was read, and what was made of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LONGEST_SHOWN = 400  # characters of a line that are kept
CONCLUDED = "kb: "  # begins a sentence that kb derived from several lines


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

    @property
    def place(self) -> str:
        """`train.log:105`; the file alone where the text was derived from it."""
        return f"{self.source}:{self.number}" if self.number else self.source

    def to_json(self) -> dict[str, Any]:
        """As answers cite it: `line` is null where the text was derived."""
        return {
            "source": self.source,
            "line": self.number or None,
            "rank": self.rank,
            "time": self.time,
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class Sighting:
    """A signature of an entry that the evidence holds: a flood of lines is one sighting with a count.

    `lines` are the first few, of different ranks where there are several; `match` is the text that matched first.
    """

    id: str
    role: str
    pattern: str
    match: str
    count: int
    ranks: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Lines that report something going wrong, equal but for numbers and addresses, known to an entry or not."""

    line: Line
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeout:
    """A rank's watchdog gave a collective up. Sizes are elements, -1 where the message does not tell."""

    rank: int
    group: str
    sequence: int
    op: str
    numel_in: int
    numel_out: int
    line: Line


@dataclass(frozen=True, slots=True)
class Progress:
    """What a rank's watchdog says of a group: the last collective it was given and the last that was done."""

    rank: int
    enqueued: int
    completed: int
    line: Line


@dataclass(frozen=True, slots=True)
class Exit:
    """What the launcher says of a rank's end: an exit code, negative for a signal."""

    rank: int
    code: int
    line: Line


@dataclass(frozen=True, slots=True)
class Scan:
    """Everything one pass over some sources found, in the order of reading.

    `observations` are sentences that kb derived; `ranks` are those that some line names; `problems` say what could
    not be read; `text` is all that was read where that was a page or two, else empty.
    """

    sightings: tuple[Sighting, ...] = ()
    failures: tuple[Failure, ...] = ()
    timeouts: tuple[Timeout, ...] = ()
    progress: tuple[Progress, ...] = ()
    exits: tuple[Exit, ...] = ()
    observations: tuple[Line, ...] = ()
    ranks: tuple[int, ...] = ()
    sources: int = 0
    lines: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()
    text: str = ""
