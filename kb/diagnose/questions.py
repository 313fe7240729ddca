"""Questions to a person when several entries fit: the lines and observations that tell these entries apart.

All texts come from the entries: a line is the sample of a signature, an observation is an item of `How to tell`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kb.content.entry import Entry, Role, Signature
from kb.content.grades import without_marks
from kb.patterns.literals import compiled
from kb.patterns.redos import backtracking_risk
from kb.search.document import tells

MOST_CANDIDATES = 3
LONGEST = 240  # characters of a choice
NOT_PRINTED = ("kb ", "the probe ")  # the source of a signature begins like this if its lines are in no log
ROLES = (Role.ROOT, Role.CASCADE, Role.CONTEXT)  # the most telling first

LINES = "What did each rank print last, and did any rank print one of these lines?"
OBSERVATIONS = "Which of these do you see?"


@dataclass(frozen=True, slots=True)
class Choice:
    """A text from entry `id`: a line that `printed_by` prints, or an observation, for which `printed_by` is empty."""

    id: str
    text: str
    printed_by: str


@dataclass(frozen=True, slots=True)
class Question:
    text: str
    choices: tuple[Choice, ...]


def questions(candidates: Sequence[Entry]) -> tuple[Question, ...]:
    """The questions that separate the first few candidates; none for fewer than two."""
    rivals = candidates[:MOST_CANDIDATES]
    if len(rivals) < 2:
        return ()
    lines = tuple(_lines(rivals))
    observations = tuple(_observations(rivals))
    return tuple(Question(text, choices) for text, choices in ((LINES, lines), (OBSERVATIONS, observations)) if choices)


def _lines(rivals: Sequence[Entry]) -> Iterator[Choice]:
    """A line of each entry that points to no other candidate."""
    for entry in rivals:
        others = [signature for other in rivals if other is not entry for signature in other.meta.signatures]
        ordered = sorted(entry.meta.signatures, key=lambda signature: ROLES.index(signature.role))
        for signature in ordered:
            if not signature.source.startswith(NOT_PRINTED) and not _is_matched(signature.sample, others):
                yield Choice(entry.id, _cut(signature.sample), signature.source)
                break


def _is_matched(line: str, signatures: Iterable[Signature]) -> bool:
    """Whether a signature matches the line. A pattern that may take long is not tried and counts as matching."""
    return any(
        backtracking_risk(signature.pattern) or compiled(signature.pattern).search(line) for signature in signatures
    )


def _observations(rivals: Sequence[Entry]) -> Iterator[Choice]:
    """An observation of each entry, if possible one that names another candidate."""
    for entry in rivals:
        names = [f"`{other.id}`" for other in rivals if other is not entry]
        items = tells(entry)
        if items:
            best = next((item for item in items if any(name in item for name in names)), items[0])
            yield Choice(entry.id, _cut(without_marks(best)), "")


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= LONGEST else f"{line[: LONGEST - 2].rpartition(' ')[0]} …"
