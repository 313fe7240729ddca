"""Turns a scan into an answer: the entries, their confidence, evidence and objections, and what to do next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from kb.content.triage import COMMONEST, PREFIX
from kb.diagnose.brief import Brief, brief
from kb.diagnose.evidence import Failure, Line, SignatureMatch
from kb.diagnose.failure_lines import is_interruption, is_launcher, is_log
from kb.diagnose.finding import Finding
from kb.diagnose.first_failure import RankSummary, summarize_ranks
from kb.diagnose.next_step import LIKELY, Documents, NextStep, ask_more, next_step, read_first_failure
from kb.diagnose.ranking import Candidate, rank_candidates
from kb.diagnose.scan.result import Scan
from kb.diagnose.story.summary import Story
from kb.diagnose.unknown_cause import has_ended_otherwise, is_before, is_cause_unknown, is_survived, objection
from kb.search.cues import named
from kb.search.index import Index
from kb.search.query import units_of
from kb.search.ranking import likeness

MOST_LINES = 20  # in each list of an answer

# Measured share of right first answers (docs/benchmarks.md): without a rival, and what to subtract for a close rival.
CONFIDENCE = {"root": (0.95, 0.25), "last": (0.65, 0.3), "cascade": (0.7, 0.25), "similar": (0.5, 0.3)}
CLEAR_LEAD = 0.5  # lead in score from which a rival no longer lowers the confidence
ROLES = ("root", "last", "cascade", "context")
ENTRY_FIELDS = ("id", "title", "title_zh", "cause", "cause_zh", "status", "origin", "probe")

MERELY_ALIKE = "none of its signatures was printed; only the wording is similar"
MERELY_CONTEXT = "this line says what happened, not why: it is printed whatever the cause"
FAILED = f"{PREFIX}{COMMONEST}"
TRACEBACK = "Traceback (most recent call last)"

LEAST_ALIKE = 0.3  # below this likeness even the best entry is noise, so likeness is never divided by less
ALIKE = 0.4  # lowest likeness that counts for a text without failures that no job printed: in effect, a question


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The result of a diagnosis. `findings` are sorted best first; `unexplained` if none of them is likely.

    `is_cause_unknown` if the findings explain only consequences and no entry knows the first failure; if that failure
    is an exception or a rank that failed by itself, the inputs are unexplained. `failures` are the failure lines,
    explained or not. `facets` are named by unexplained inputs, at least that they failed, and select what to look at
    next; a log that is not from training has none. `brief` is the answer at a glance, `story` what each rank did.
    """

    findings: tuple[Finding, ...]
    unexplained: bool
    is_cause_unknown: bool
    ranks: RankSummary
    observations: tuple[Line, ...]
    failures: tuple[Failure, ...]
    next_step: NextStep | None
    facets: tuple[str, ...]
    sources: int
    lines: int
    bytes: int
    problems: tuple[str, ...]
    brief: Brief = field(default_factory=Brief)
    story: Story = field(default_factory=Story)

    def to_json(self) -> dict[str, Any]:
        """The diagnosis as `kb diagnose --json` prints it."""
        failures = [
            {**failure.line.to_json(), "count": failure.count, "ranks": failure.ranks} for failure in self.failures
        ]
        return {
            "findings": [finding.to_json() for finding in self.findings],
            "brief": self.brief.to_json(),
            "unexplained": self.unexplained,
            "ranks": self.ranks.to_json(),
            "story": self.story.to_json(),
            "observations": [line.to_json() for line in self.observations],
            "seen": failures,
            "next_step": asdict(self.next_step) if self.next_step else None,
            "read": {"sources": self.sources, "lines": self.lines, "bytes": self.bytes},
            "problems": self.problems,
        }


def diagnose(index: Index, scan: Scan) -> Diagnosis:
    """Diagnose a scan; the only I/O is reading the index. A log without findings and failures is not unexplained."""
    by_entry = _likeness(index, scan)
    most = max([LEAST_ALIKE, *by_entry.values()])
    relative = {entry: value / most for entry, value in by_entry.items()}
    matches = scan.matches if _ended_silently(scan) else [_without_last(match) for match in scan.matches]
    facts = {fact.text for fact in scan.story.facts}
    candidates = rank_candidates(matches, relative, index.causes, index.masks, facts)
    if scan.story.completion and all(scan.story.has_survived(failure.line) for failure in scan.failures):
        # What the job survived did not end it. Root matches and facts of the story count nevertheless.
        scan = replace(scan, failures=())
        candidates = tuple(
            each for each in candidates if each.role == "root" or facts & {line.text for line in each.lines}
        )
    elif has_ended_otherwise(candidates, scan):
        candidates = tuple(each for each in candidates if not is_survived(each, scan.story))
    documents = {index.numbers[number]: index.document(number) for number in _numbers(index, candidates)}
    ranks = summarize_ranks(scan, candidates)
    findings = _findings(candidates, documents, ranks)
    cause_unknown = is_cause_unknown(candidates, ranks)
    has_culprit = ranks.has_raised or ranks.culprit is not None
    is_explained = _is_explained(findings) and not (cause_unknown and has_culprit)
    is_unexplained = bool(scan.failures or scan.observations or findings) and not is_explained
    step = read_first_failure(ranks) if cause_unknown else next_step(findings, documents, ranks)
    is_known = is_explained and not cause_unknown
    answer = brief(findings, documents, ranks, scan.story.facts, is_explained=is_known)
    return Diagnosis(
        findings=findings,
        unexplained=is_unexplained,
        is_cause_unknown=cause_unknown,
        ranks=ranks,
        observations=scan.observations[:MOST_LINES],
        failures=scan.failures[:MOST_LINES],
        next_step=step or ask_more([failure.line.text for failure in scan.failures]),
        facets=_facets(index, scan, ranks) if is_unexplained else (),
        sources=scan.sources,
        lines=scan.lines,
        bytes=scan.bytes,
        problems=scan.problems,
        brief=answer,
        story=scan.story,
    )


def _is_explained(findings: Sequence[Finding]) -> bool:
    """Whether the first finding is likely because of a printed line; similar wording alone proves nothing."""
    return bool(findings) and findings[0].role != "similar" and findings[0].confidence >= LIKELY


def _facets(index: Index, scan: Scan, ranks: RankSummary) -> tuple[str, ...]:
    """The facets that the scan names; none for a log that has no rank and only says that something failed."""
    from kb.content.facets import values_of  # explained inputs do not need its enumerations

    values = tuple(values_of(named(units_of(salient_text(scan)), index.cues)))
    if not ranks.known and {FAILED}.issuperset(values):
        return ()
    return values or (FAILED,)


def _ended_silently(scan: Scan) -> bool:
    """Whether no line reports a failure other than that somebody or a scheduler ended the job.

    The last line is evidence only in this case.
    """
    return all(is_interruption(failure.line.text) or TRACEBACK in failure.line.text for failure in scan.failures)


def _without_last(match: SignatureMatch) -> SignatureMatch:
    return replace(match, role="context") if match.role == "last" else match


def salient_text(scan: Scan) -> str:
    """The text to compare with the entries: the whole text if it is short, else the matched and failure lines."""
    if scan.text:
        return scan.text
    lines = [line.text for match in scan.matches for line in match.lines[:1]]
    failed = [failure.line.text for failure in scan.failures]
    return "\n".join(text for text in dict.fromkeys([*lines, *failed]) if not is_launcher(text))


def _likeness(index: Index, scan: Scan) -> dict[str, float]:
    by_entry = likeness(index, salient_text(scan))
    if scan.failures or any(match.role != "context" for match in scan.matches):
        return by_entry
    if not scan.text or is_log(scan.text):
        return {}
    return {entry: value for entry, value in by_entry.items() if value >= ALIKE}


def _numbers(index: Index, candidates: Sequence[Candidate]) -> list[int]:
    """The document numbers of the candidates in the index."""
    ids = {candidate.id for candidate in candidates}
    return [number for number, entry in index.numbers.items() if entry in ids]


def _findings(candidates: Sequence[Candidate], documents: Documents, ranks: RankSummary) -> tuple[Finding, ...]:
    findings: list[Finding] = []
    ceiling = 1.0
    for position, candidate in enumerate(candidates):
        rival = next((other.score for other in candidates[position + 1 :] if candidate.id not in other.caused_by), 0.0)
        effects = {other.id for other in candidates if candidate.id in other.caused_by}
        ceiling = min(ceiling, _confidence(candidate, candidate.score - rival))
        against = _against(candidate, ranks, effects)
        findings.append(_finding(candidate, ceiling, documents[candidate.id], against))
    return tuple(findings)


def _confidence(candidate: Candidate, lead: float) -> float:
    alone, doubt = CONFIDENCE[candidate.role]
    return round(alone - doubt * (1 - min(1.0, max(0.0, lead) / CLEAR_LEAD)), 2)


def _finding(candidate: Candidate, confidence: float, document: Mapping[str, Any], against: tuple[str, ...]) -> Finding:
    matches = [match for match in candidate.matches if match.role != "context"] or list(candidate.matches)
    matches.sort(key=lambda match: ROLES.index(match.role))
    return Finding(
        **{name: document[name] for name in ENTRY_FIELDS},
        role=candidate.role,
        confidence=confidence,
        count=sum(match.count for match in matches),
        ranks=tuple(sorted({rank for match in matches for rank in match.ranks})),
        evidence=tuple(dict.fromkeys(line for match in matches for line in match.lines))[:MOST_LINES],
        caused_by=candidate.caused_by,
        against=against,
        fix_number=_fix_number(matches, document["fix_by_pattern"]),
    )


def _fix_number(matches: Sequence[SignatureMatch], fix_by_pattern: Mapping[str, int]) -> int:
    """The first fix that a signature of the strongest role names; 1 if none does."""
    strongest = (match for match in matches if match.role == matches[0].role)
    return next((fix_by_pattern[match.pattern] for match in strongest if match.pattern in fix_by_pattern), 1)


def _against(candidate: Candidate, ranks: RankSummary, effects: set[str]) -> tuple[str, ...]:
    """The objections of a careful reader."""
    objections = []
    first = ranks.first_failure
    if candidate.role == "similar":
        objections.append(MERELY_CONTEXT if candidate.matches else MERELY_ALIKE)
    if candidate.role == "last":
        objections.append("no error was printed: the log stops where this incident stops")
    if candidate.caused_by:
        objections.append(f"it follows from {', '.join(candidate.caused_by)}, which matched as well")
    if shared := [other for other in candidate.shared_with if other not in effects]:
        objections.append(f"the same lines fit {', '.join(shared)}")
    if candidate.role == "cascade" and not candidate.caused_by:
        objections.insert(0, objection(candidate, ranks))
    elif first and candidate.role != "similar" and not any(is_before(line, first) for line in candidate.lines):
        objections.append(f"something else failed first: {first.place}")
    return tuple(objections)
