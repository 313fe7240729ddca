"""The evidence of a diagnosis: lines with their places in the inputs, and what was read from them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kb.printable import printable

LONGEST_EVIDENCE = 400  # characters of a line that are stored
DERIVED_PREFIX = "kb: "  # begins a sentence that kb derived from several lines
SINCE_EPOCH = 1e9  # seconds; smaller times count from the start of a machine and are comparable only within one file


@dataclass(frozen=True, slots=True)
class Line:
    """A line of evidence.

    `source` is the file as the user named it. `number` is the line number, from 1, or 0 for a text that was derived
    from a dump and has no line. `rank` and `time` (seconds since the epoch, or since the start of the log if it prints
    no date) are None if the input does not give them. `text` has no colours and at most `LONGEST_EVIDENCE` characters.
    Characters that would control a terminal or hide text are escaped in `text` and `source`.
    """

    source: str
    number: int
    text: str
    rank: int | None = None
    time: float | None = None

    def __post_init__(self) -> None:
        if not (self.text.isprintable() and self.source.isprintable()):
            object.__setattr__(self, "text", printable(self.text))
            object.__setattr__(self, "source", printable(self.source))

    @property
    def place(self) -> str:
        """`train.log:105`; only the file for a derived text."""
        return f"{self.source}:{self.number}" if self.number else self.source

    def to_json(self) -> dict[str, Any]:
        """The line as answers cite it. `line` is null if derived, `time` (ISO 8601, UTC) if the date is unknown."""
        return {
            "source": self.source,
            "line": self.number or None,
            "rank": self.rank,
            "time": utc_time(self.time),
            "text": self.text,
        }


@dataclass(frozen=True, slots=True)
class SignatureMatch:
    """A signature of entry `id` and the lines that it matched; many matching lines are one match with a count.

    `lines` are the first few, from different ranks if possible; `text` is what the signature matched first.
    """

    id: str
    role: str
    pattern: str
    text: str
    count: int
    ranks: tuple[int, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Failure:
    """Failure lines that differ only in numbers and addresses, whether or not an entry knows them."""

    line: Line
    count: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Timeout:
    """A collective that timed out in the watchdog of a rank. Sizes are in elements, -1 if the message has none."""

    rank: int
    group: str
    sequence: int
    op: str
    numel_in: int
    numel_out: int
    line: Line


@dataclass(frozen=True, slots=True)
class GroupProgress:
    """The last collectives of a process group that a rank enqueued and completed, as its watchdog reports them."""

    rank: int
    enqueued: int
    completed: int
    line: Line


@dataclass(frozen=True, slots=True)
class Exit:
    """How a rank ended, as the launcher reports it: an exit code, negative for a signal."""

    rank: int
    code: int
    line: Line


def utc_time(seconds: float | None) -> str | None:
    """A time like `2026-03-01T08:30:00Z`; None if `seconds` has no date, such as seconds since a machine started."""
    if seconds is None or seconds < SINCE_EPOCH:
        return None
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):  # a time zone can move a time past the year 9999
        return None
