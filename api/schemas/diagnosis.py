"""The document of a diagnosis, as `kb diagnose --json` prints it, described for OpenAPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from kb.diagnose.finding import Finding

from .content import HIT, ID, SUMMARY

CITATION = {"source": "body", "line": 812, "rank": 2, "time": None, "text": "Watchdog caught collective operation ..."}
EXAMPLE: dict[str, Any] = {
    "findings": [
        {
            **{key: SUMMARY[key] for key in ("id", "title", "title_zh", "cause", "status", "origin", "probe")},
            "cause_zh": HIT["cause_zh"],
            "role": "cascade",
            "confidence": 0.65,
            "count": 3,
            "ranks": [1, 2, 3],
            "evidence": [CITATION],
            "caused_by": [],
            "against": ["what was printed is what waiting or surviving ranks print"],
        }
    ],
    "unexplained": False,
    "ranks": {"failed_first": None, "first_failure": None, "absent": [0], "known": [0, 1, 2, 3]},
    "observations": [{**CITATION, "rank": 0, "text": "kb: rank 0 reported no timeout while 3 others waited"}],
    "seen": [{**CITATION, "count": 3, "ranks": [1, 2, 3]}],
    "next_step": {"text": "Read what rank 0 did.", "source": "", "separates": [ID], "command": ""},
    "read": {"sources": 1, "lines": 4000, "bytes": 480000},
    "problems": [],
}


class Citation(BaseModel):
    """A line of the evidence. `line` counts from 1 and is null for what kb derived; `time` is in seconds."""

    source: str
    line: int | None
    rank: int | None
    time: float | None
    text: str


@dataclass(frozen=True, slots=True)
class FindingDocument(Finding):
    """An entry that explains the log or a part of it.

    `role`: root, cascade, last (the log stops where this incident stops) or similar (only the wording is alike).
    `confidence`: the measured share of findings like this one that were right.
    """

    role: Literal["root", "cascade", "last", "similar"]
    evidence: tuple[Citation, ...]  # type: ignore[assignment]  # `Finding.to_json` makes them of lines


class Ranks(BaseModel):
    """The rank that failed first, those that missed a collective in which others waited, and all named ranks."""

    failed_first: int | None
    first_failure: Citation | None
    absent: tuple[int, ...]
    known: tuple[int, ...]


class Seen(Citation):
    """A line that reports a failure, whether or not an entry knows it, and how often it was printed."""

    count: int
    ranks: tuple[int, ...]


class Step(BaseModel):
    """What to do next. `separates` are the entries that it tells apart; `source` is the entry that says so."""

    text: str
    source: str
    separates: tuple[str, ...]
    command: str


class Read(BaseModel):
    """How much was read."""

    sources: int
    lines: int
    bytes: int


class DiagnosisDocument(BaseModel):
    """Findings, best first. `unexplained`: something failed, and no finding explains it with enough confidence."""

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    findings: tuple[FindingDocument, ...]
    unexplained: bool
    ranks: Ranks
    observations: tuple[Citation, ...]
    seen: tuple[Seen, ...]
    next_step: Step | None
    read: Read
    problems: tuple[str, ...]
