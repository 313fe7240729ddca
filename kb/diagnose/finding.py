"""A finding: one entry in the answer of a diagnosis."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from kb.diagnose.evidence import Line


@dataclass(frozen=True, slots=True)
class Finding:
    """An entry that explains the evidence or part of it.

    `role`: root (a signature of the cause was printed), cascade (a consequence was printed), last (the log stops at a
    line where this incident stops) or similar (the wording is similar, no signature matched). `confidence` is the
    measured share of findings like this one that were right. `fix_number` is the item of `Fix` to begin with.
    `against` are objections, as sentences.
    """

    id: str
    title: str
    title_zh: str
    cause: str
    cause_zh: str
    status: str
    origin: str
    probe: str | None
    role: str
    confidence: float
    count: int
    ranks: tuple[int, ...]
    evidence: tuple[Line, ...]
    caused_by: tuple[str, ...]
    against: tuple[str, ...]
    fix_number: int

    def to_json(self) -> dict[str, Any]:
        """The finding as `kb diagnose --json` prints it."""
        return {**asdict(self), "evidence": [line.to_json() for line in self.evidence]}
