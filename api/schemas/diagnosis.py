"""The document of a diagnosis, described for OpenAPI: that of `kb diagnose --json`, but shorter and with fixes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from kb.content.catalog import Catalog
from kb.content.claims import claims
from kb.content.entry import Entry
from kb.content.triage import Triage, first_observations
from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.finding import Finding
from kb.diagnose.next_step import CERTAIN
from kb.diagnose.questions import Question, questions
from kb.diagnose.story.summary import AttemptSummary

from .content import HIT, ID, SUMMARY, ObservationDocument, QuestionDocument
from .times import UtcTime

LIMIT, LINES = 3, 3  # findings and lines per list, unless a client asks for more
CITATION = {
    "source": "body",
    "line": 812,
    "rank": 2,
    "time": "2026-03-01T08:30:00Z",
    "text": "Watchdog caught collective operation ...",
}
FIX = {
    "text": "1. **Call `state_dict()` on every rank**, and write the file on rank 0 alone.",
    "citation": f"[{ID} § Fix, seen in the probe]",
}
BRIEF = {
    "entry": ID,
    "title": SUMMARY["title"],
    "title_zh": SUMMARY["title_zh"],
    "decisive": {**CITATION, "rank": 0, "text": "kb: rank 0 reported no timeout while 3 others waited"},
    "fix": "Call state_dict() on every rank, and write the file on rank 0 alone.",
    "fix_zh": "",
    "fix_number": 1,
}
FACT = {
    "kind": "busy",
    "text": "kb: rank 0 went on with save part 16/30 while ranks 1-3 waited in barrier called from train.py:203 save",
    "ranks": [0],
    "lines": [{"source": "body", "line": 790}, {"source": "body", "line": 812}],
}
ROW = {
    "rank": 0,
    "spans": [{"phase": "train", "start": 0.1, "end": 0.5, "last": "train step 24"}],
    "mark": "",
    "marked_at": 1.0,
    "place": "",
    "error": "",
    "ending": "SIGTERM",
}
LOSS = {
    "name": "loss",
    "rank": 0,
    "count": 24,
    "first": 2.31,
    "last": 1.22,
    "lowest": 1.22,
    "highest": 2.31,
    "not_finite": 0,
    "not_finite_at": "",
}
EXAMPLE: dict[str, Any] = {
    "brief": BRIEF,
    "story": {"attempts": [{"rows": [ROW], "metrics": [LOSS], "seconds": 83.0, "lines": 4000}], "facts": [FACT]},
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
            "fix_number": 1,
            "fix": FIX,
            "url": f"http://127.0.0.1:8000/entries/{ID}",
        }
    ],
    "omitted": {"findings": 4, "lines": 17},
    "unexplained": False,
    "ranks": {"failed_first": None, "first_failure": None, "absent": [0], "known": [0, 1, 2, 3]},
    "observations": [{**CITATION, "rank": 0, "text": "kb: rank 0 reported no timeout while 3 others waited"}],
    "seen": [{**CITATION, "count": 3, "ranks": [1, 2, 3]}],
    "next_step": {"text": "Read what rank 0 did.", "source": "", "separates": [ID], "command": ""},
    "read": {"sources": 1, "lines": 4000, "bytes": 480000},
    "problems": [],
    "triage": [],
    "ask": [],
}


class Citation(BaseModel):
    """A line of the evidence. `line` counts from 1 and is null for what kb derived.

    `time` is null if the line has no date; a date without a zone counts as UTC.
    """

    source: str
    line: int | None
    rank: int | None
    time: UtcTime | None
    text: str


class FixDocument(BaseModel):
    """A fix of an entry, in Markdown, with its code, and the citation to pass on with it."""

    text: str
    citation: str

    @classmethod
    def of(cls, entry: Entry, number: int) -> Self | None:
        """The item of the section Fix with this number, or else its first text."""
        fixes = list(claims(entry, ["Fix"]))
        claim = next((claim for claim in fixes if claim.text.startswith(f"{number}. ")), fixes[0] if fixes else None)
        return cls(text=claim.text, citation=claim.citation) if claim else None


@dataclass(frozen=True, slots=True)
class FindingDocument(Finding):
    """An entry that explains the log or a part of it.

    `role`: root, cascade, last (the log stops where this incident stops) or similar (only the wording is alike).
    `confidence`: the measured share of findings like this one that were right. `fix`: the fix to try first, which is
    the item `fix_number` of `Fix`; null if the entry has none. `url`: the page of the entry.
    """

    role: Literal["root", "cascade", "last", "similar"]
    evidence: tuple[Citation, ...]  # type: ignore[assignment]  # `Finding.to_json` makes them from lines
    fix: FixDocument | None
    url: str


class Ranks(BaseModel):
    """The rank that failed first, the ranks that missed a collective in which others waited, and all named ranks."""

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


class Position(BaseModel):
    """A line of an input; `line` is null for what is not on a line."""

    source: str
    line: int | None


class FactDocument(BaseModel):
    """A sentence that follows from comparing ranks. `ranks` are the ranks that it accuses, if any."""

    kind: str
    text: str
    ranks: tuple[int, ...]
    lines: tuple[Position, ...]


class StoryDocument(BaseModel):
    """What each rank did. An attempt has metrics, and a row per rank with its phases as fractions of the attempt."""

    attempts: tuple[AttemptSummary, ...]
    facts: tuple[FactDocument, ...]


class BriefDocument(BaseModel):
    """The answer at a glance. `entry` is null if the cause is unknown; `fix` is the fix to try first."""

    entry: str | None
    title: str
    title_zh: str
    decisive: Citation | None
    fix: str
    fix_zh: str
    fix_number: int


class Omitted(BaseModel):
    """What `limit` and `lines` left out."""

    findings: int
    lines: int


class DiagnosisDocument(BaseModel):
    """Findings, best first. `unexplained`: something failed, and no finding explains it with enough confidence.

    `ask`: what to ask a person when the findings are not certain; empty when there is nothing to tell apart.
    """

    model_config = ConfigDict(json_schema_extra={"examples": [EXAMPLE]})
    findings: tuple[FindingDocument, ...]
    brief: BriefDocument
    omitted: Omitted
    unexplained: bool
    ranks: Ranks
    story: StoryDocument
    observations: tuple[Citation, ...]
    seen: tuple[Seen, ...]
    next_step: Step | None
    read: Read
    problems: tuple[str, ...]
    triage: tuple[ObservationDocument, ...] = Field(
        description="What to look at where no finding explains the log, each with what an outcome points to."
    )
    ask: tuple[QuestionDocument, ...] = Field(
        description="Each with the lines or observations that tell findings apart."
    )

    @classmethod
    def of(cls, diagnosis: Diagnosis, catalog: Catalog, triage: Triage, entries: str, limit: int, lines: int) -> Self:
        """The document of a diagnosis. `entries` is the base URL of the pages of entries."""
        short = shorten(diagnosis, limit, lines)
        document = short.to_json()
        for finding in document["findings"]:
            entry = catalog.entries.get(finding["id"])
            fix = entry and FixDocument.of(entry, finding["fix_number"])
            finding |= {"fix": fix, "url": f"{entries}/{finding['id']}"}
        omitted = Omitted(
            findings=len(diagnosis.findings) - len(short.findings), lines=_line_count(diagnosis) - _line_count(short)
        )
        ask = tuple(map(QuestionDocument.model_validate, open_questions(diagnosis, catalog)))
        asked = first_observations(triage, diagnosis.facets)
        instead = [observation.to_json(in_chinese=False) for observation in asked]
        return cls.model_validate({**document, "omitted": omitted, "triage": instead, "ask": ask})


def shorten(diagnosis: Diagnosis, limit: int, lines: int) -> Diagnosis:
    """A diagnosis with at most `limit` findings, and at most `lines` lines in each list."""
    findings = tuple(replace(finding, evidence=finding.evidence[:lines]) for finding in diagnosis.findings[:limit])
    return replace(
        diagnosis,
        findings=findings,
        observations=diagnosis.observations[:lines],
        failures=diagnosis.failures[:lines],
    )


def open_questions(diagnosis: Diagnosis, catalog: Catalog) -> tuple[Question, ...]:
    """Questions for a person if the diagnosis is not certain. A cause that a root signature names needs no question."""
    findings = diagnosis.findings
    if not findings or (findings[0].confidence >= CERTAIN and not diagnosis.unexplained):
        return ()
    ids = [finding.id for finding in findings if finding.role != "root" and finding.id in catalog.entries]
    return questions([catalog.entries[entry_id] for entry_id in ids])


def _line_count(diagnosis: Diagnosis) -> int:
    evidence: Sequence[int] = [len(finding.evidence) for finding in diagnosis.findings]
    return sum(evidence) + len(diagnosis.observations) + len(diagnosis.failures)
