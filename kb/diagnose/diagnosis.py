"""A scan to an answer: which entries, how sure, on which lines, what speaks against, and what to do next."""

from __future__ import annotations

from dataclasses import dataclass

from kb.diagnose.evidence import Failure, Line, Scan
from kb.diagnose.matcher import Matcher
from kb.diagnose.ranking import Candidate, rank
from kb.diagnose.scan import scan_text
from kb.index import Index
from kb.search import likeness

MOST_SEEN = 12
EXPLAINED = 0.3


@dataclass(frozen=True, slots=True)
class Finding:
    id: str
    role: str
    confidence: float
    evidence: tuple[Line, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    findings: tuple[Finding, ...]
    unexplained: bool
    seen: tuple[Failure, ...]


def diagnose(index: Index, scan: Scan) -> Diagnosis:
    has_failed = bool(scan.failures) or any(one.role != "context" for one in scan.sightings)
    like = likeness(index, salient(scan))
    if not has_failed:
        v = sorted(like.values(), reverse=True)
        ok = len(scan.text) < 2000 and len(v) > 1 and v[0] > 0.6 and v[0] - v[1] > 0.15
        like = {k: x for k, x in like.items() if ok and x == v[0]}
    best = max(like.values(), default=0) or 1
    rel = {k: v / best for k, v in like.items()}
    candidates = rank(scan.sightings, rel, index.causes, index.masks)
    findings = tuple(_finding(one, like.get(one.id, 0)) for one in candidates)
    return Diagnosis(findings, not findings or findings[0].confidence < EXPLAINED, scan.failures[:MOST_SEEN])


def salient(scan: Scan) -> str:
    if scan.text:
        return scan.text
    lines = [line.text for one in scan.sightings for line in one.lines[:1]]
    return "\n".join(dict.fromkeys([*lines, *(one.line.text for one in scan.failures)]))


def _finding(one: Candidate, like: float) -> Finding:
    base = {"root": 0.7, "cascade": 0.4, "similar": 0.2, "last": 0.3}[one.role]
    return Finding(one.id, one.role, min(0.95, base + 0.1 * (len(one.sightings) > 1)), one.lines)


def diagnose_bytes(index: Index, matcher: Matcher, data: bytes) -> Diagnosis:
    return diagnose(index, scan_text([data], matcher))
