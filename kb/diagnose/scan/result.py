"""Everything that one pass over the inputs of a diagnosis found."""

from __future__ import annotations

from dataclasses import dataclass, field

from kb.diagnose.evidence import Exit, Failure, GroupProgress, Line, SignatureMatch, Timeout
from kb.diagnose.story.summary import Story


@dataclass(frozen=True, slots=True)
class Scan:
    """In the order of reading.

    `observations` are sentences that kb derived; `ranks` are the ranks that any line names; `problems` say what could
    not be read; `text` is the whole text of the inputs if it is no longer than a page or two, else empty;
    `story` is what each rank did.
    """

    matches: tuple[SignatureMatch, ...] = ()
    failures: tuple[Failure, ...] = ()
    timeouts: tuple[Timeout, ...] = ()
    progress: tuple[GroupProgress, ...] = ()
    exits: tuple[Exit, ...] = ()
    observations: tuple[Line, ...] = ()
    ranks: tuple[int, ...] = ()
    sources: int = 0
    lines: int = 0
    bytes: int = 0
    problems: tuple[str, ...] = ()
    text: str = ""
    story: Story = field(default_factory=Story)
