"""The result of one pass over the inputs of a diagnosis."""

from __future__ import annotations

from dataclasses import dataclass, field

from kb.diagnose.evidence import Exit, Failure, GroupProgress, Line, SignatureMatch, Timeout
from kb.diagnose.story.summary import Story


@dataclass(frozen=True, slots=True)
class Scan:
    """What was found in the inputs, in the order of reading.

    `observations` are sentences that kb derived; `ranks` are all ranks that are named; `problems` say what could not
    be read; `text` is the whole text of the inputs if it is at most a page or two, else empty; `story` is what each
    rank did.
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
