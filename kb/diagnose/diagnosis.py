"""A scan to an answer: which entries, how sure, on which lines, what speaks against, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kb.diagnose.evidence import Failure, Line, Scan, Sighting
from kb.diagnose.failure_lines import is_interruption, is_launcher, is_log
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import Culprits, culprits
from kb.diagnose.next_step import LIKELY, NextStep, next_step, read_first
from kb.diagnose.ranking import Candidate, rank
from kb.diagnose.unknown_cause import is_before, is_elsewhere, objection
from kb.search.index import Index
from kb.search.ranking import likeness

MOST_SEEN = 20

# Share of right first answers, measured (docs/benchmarks.md): without a rival, and how much a close rival takes away.
CONFIDENCE = {"root": (0.95, 0.25), "last": (0.65, 0.3), "cascade": (0.7, 0.25), "similar": (0.5, 0.3)}
CLEAR = 0.5  # lead in score that leaves no doubt which of two is meant

TRACEBACK = "Traceback (most recent call last)"

LEAST_ALIKE = 0.3  # likeness below which the best of all entries is noise, and is not scaled up to be the best
ALIKE = 0.4  # likeness that counts for a page in which nothing failed and that no job printed: a question, in effect


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Findings, best first. `unexplained` when none of them is likely; `seen` is what failed all the same.

    `is_elsewhere` when the findings tell what followed, and no entry knows what failed first (`ranks.first`). An
    exception there leaves the log unexplained.
    """

    findings: tuple[Finding, ...]
    unexplained: bool
    is_elsewhere: bool
    ranks: Culprits
    observations: tuple[Line, ...]
    seen: tuple[Failure, ...]
    next_step: NextStep | None
    sources: int
    lines: int
    bytes: int
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As `kb diagnose --json` gives it."""
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "unexplained": self.unexplained,
            "ranks": self.ranks.to_json(),
            "observations": [line.to_json() for line in self.observations],
            "seen": [{**one.line.to_json(), "count": one.count, "ranks": one.ranks} for one in self.seen],
            "next_step": asdict(self.next_step) if self.next_step else None,
            "read": {"sources": self.sources, "lines": self.lines, "bytes": self.bytes},
            "problems": self.problems,
        }


def diagnose(index: Index, scan: Scan) -> Diagnosis:
    """Pure but for reading the index. A healthy log has no findings and nothing seen; that is not unexplained."""
    like = _likeness(index, scan)
    most = max([LEAST_ALIKE, *like.values()])
    relative = {entry: value / most for entry, value in like.items()}
    sightings = scan.sightings if _ended_silently(scan) else [_no_end(sighting) for sighting in scan.sightings]
    candidates = rank(sightings, relative, index.causes, index.masks)
    documents = {index.numbers[number]: index.document(number) for number in _numbers(index, candidates)}
    who = culprits(scan, candidates)
    findings = _findings(candidates, documents, who)
    elsewhere = is_elsewhere(candidates, who)
    is_explained = bool(findings) and findings[0].confidence >= LIKELY and not (elsewhere and who.has_raised)
    has_failed = bool(scan.failures or scan.observations or findings)
    return Diagnosis(
        findings=findings,
        unexplained=has_failed and not is_explained,
        is_elsewhere=elsewhere,
        ranks=who,
        observations=scan.observations[:MOST_SEEN],
        seen=scan.failures[:MOST_SEEN],
        next_step=read_first(who) if elsewhere else next_step(findings, documents, who),
        sources=scan.sources,
        lines=scan.lines,
        bytes=scan.bytes,
        problems=scan.problems,
    )


def _ended_silently(scan: Scan) -> bool:
    """Whether nothing failed in words, save that somebody or a scheduler ended it: then where it ended is evidence."""
    return all(is_interruption(failure.line.text) or TRACEBACK in failure.line.text for failure in scan.failures)


def _no_end(one: Sighting) -> Sighting:
    return replace(one, role="context") if one.role == "last" else one


def salient(scan: Scan) -> str:
    """What is compared with the texts of the entries: everything where it is a page, else what failed."""
    if scan.text:
        return scan.text
    lines = [line.text for sighting in scan.sightings for line in sighting.lines[:1]]
    failed = [failure.line.text for failure in scan.failures]
    return "\n".join(text for text in dict.fromkeys([*lines, *failed]) if not is_launcher(text))


def _likeness(index: Index, scan: Scan) -> dict[str, float]:
    like = likeness(index, salient(scan))
    if scan.failures or any(sighting.role != "context" for sighting in scan.sightings):
        return like
    if not scan.text or is_log(scan.text):
        return {}
    return {entry: value for entry, value in like.items() if value >= ALIKE}


def _numbers(index: Index, candidates: Sequence[Candidate]) -> list[int]:
    wanted = {candidate.id for candidate in candidates}
    return [number for number, entry in index.numbers.items() if entry in wanted]


def _findings(
    candidates: Sequence[Candidate], documents: Mapping[str, Mapping[str, Any]], who: Culprits
) -> tuple[Finding, ...]:
    found: list[Finding] = []
    ceiling = 1.0
    for position, candidate in enumerate(candidates):
        rival = next((other.score for other in candidates[position + 1 :] if candidate.id not in other.caused_by), 0.0)
        effects = {other.id for other in candidates if candidate.id in other.caused_by}
        ceiling = min(ceiling, _confidence(candidate, candidate.score - rival))
        found.append(_finding(candidate, ceiling, documents[candidate.id], _against(candidate, who, effects)))
    return tuple(found)


def _confidence(one: Candidate, lead: float) -> float:
    alone, doubt = CONFIDENCE[one.role]
    return round(alone - doubt * (1 - min(1.0, max(0.0, lead) / CLEAR)), 2)


def _finding(one: Candidate, confidence: float, document: Mapping[str, Any], against: tuple[str, ...]) -> Finding:
    evident = [sighting for sighting in one.sightings if sighting.role != "context"] or list(one.sightings)
    evident.sort(key=lambda sighting: ROLES.index(sighting.role))
    return Finding(
        **{name: document[name] for name in SHOWN},
        role=one.role,
        confidence=confidence,
        count=sum(sighting.count for sighting in evident),
        ranks=tuple(sorted({rank for sighting in evident for rank in sighting.ranks})),
        evidence=tuple(dict.fromkeys(line for sighting in evident for line in sighting.lines))[:MOST_SEEN],
        caused_by=one.caused_by,
        against=against,
    )


ROLES = ("root", "last", "cascade", "context")
SHOWN = ("id", "title", "title_zh", "cause", "cause_zh", "status", "origin", "probe")


def _against(one: Candidate, who: Culprits, effects: set[str]) -> tuple[str, ...]:
    """What a careful reader would object."""
    said = []
    first = who.first
    if one.role == "similar":
        said.append("no signature of it was printed, only the wording is alike")
    if one.role == "last":
        said.append("nothing failed in words: the log merely stops where this incident stops")
    if one.caused_by:
        said.append(f"it follows from {', '.join(one.caused_by)}, which was seen as well")
    if shared := [other for other in one.shared_with if other not in effects]:
        said.append(f"the same lines fit {', '.join(shared)}")
    if one.role == "cascade" and not one.caused_by:
        said.insert(0, objection(one, who))
    elif first and one.role != "similar" and not any(is_before(line, first) for line in one.lines):
        said.append(f"something else failed before: {first.place}")
    return tuple(said)
