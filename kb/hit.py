"""What a search answers: hits as they are stored, printed and sent."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kb.applies import Applicability
from kb.explanation import Explanation

IF_ASKED = ("why", "applicability")  # members of a hit that are there only for who wants them
SNIPPET_LENGTH = 160


@dataclass(frozen=True, slots=True)
class Hit:
    """One entry with a reason. `matched` are the user's words; `signature` the pattern that matched, or "".

    `why` are the parts of the score, `applicability` what the versions here say: both None unless asked for.
    """

    id: str
    title: str
    title_zh: str
    cause: str
    cause_zh: str
    status: str
    severity: str
    tags: tuple[str, ...]
    frameworks: tuple[str, ...]
    origin: str
    probe: str | None
    score: float
    matched: tuple[str, ...]
    signature: str
    snippet: str
    why: Explanation | None = None
    applicability: Applicability | None = None

    def to_json(self) -> dict[str, Any]:
        """The hit as `kb search --json` gives it."""
        return asked(asdict(self))


def asked(hit: dict[str, Any]) -> dict[str, Any]:
    """A hit's document without the members that nobody asked for."""
    return {name: value for name, value in hit.items() if value is not None or name not in IF_ASKED}


@dataclass(frozen=True, slots=True)
class Answer:
    """Hits, best first, and a corrected spelling when words of the question are unknown."""

    query: str
    hits: tuple[Hit, ...]
    did_you_mean: str


def snippet(lines: list[str], matched: tuple[str, ...]) -> str:
    """The stored line with most of the matched words, cut around the first of them."""
    words = [word.lower() for word in matched]

    def found_in(line: str) -> int:
        low = line.lower()
        return sum(word in low for word in words)

    line = max(lines, key=found_in, default="")
    at = min((line.lower().find(word) for word in words if word in line.lower()), default=0)
    start = max(0, at - SNIPPET_LENGTH // 3)
    cut = line[start : start + SNIPPET_LENGTH]
    return f"{'…' if start else ''}{cut}{'…' if start + SNIPPET_LENGTH < len(line) else ''}"
