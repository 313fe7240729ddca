"""A diagnosis on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from kb.diagnose.diagnosis import Diagnosis
from kb.diagnose.evidence import DERIVED_PREFIX, SINCE_EPOCH, Line
from kb.diagnose.finding import Finding
from kb.diagnose.next_step import CERTAIN
from kb.harness.collective import name_ranks

from .fields import headline, labelled, print_commands
from .hints import with_roots
from .output import style

MOST_FINDINGS = 3
MOST_LINES = 3
MOST_FAILURES = 8
WIDEST_LINE = 160


def print_diagnosis(diagnosis: Diagnosis, limit: int | None, roots: Sequence[Path] | None = None) -> None:
    """`limit` is the most findings that are printed; `roots` are the content roots that the command named."""
    limit = limit or MOST_FINDINGS
    if diagnosis.unexplained:
        _print_unexplained(diagnosis, limit, roots)
    elif diagnosis.findings:
        if diagnosis.is_cause_unknown:
            _print_first_failure(diagnosis)
            print()
        _print_findings(diagnosis, limit, roots)
    elif diagnosis.bytes:
        lines, files = _counted(diagnosis.lines, "line"), _counted(diagnosis.sources, "file")
        print(f"no line reports a failure in English or Chinese: {lines} of {files} read")
    else:
        print(f"there is nothing to read: {_counted(diagnosis.sources, 'file')} of 0 bytes")
    if not diagnosis.unexplained and not diagnosis.is_cause_unknown:
        _print_first_failure(diagnosis)
    _print_observations(diagnosis)
    step = diagnosis.next_step
    if step and step.text:
        print(labelled("next", with_roots(step.text.replace("**", ""), roots)))
        if step.command:
            print(f"   run      {style(with_roots(step.command, roots), 'green')}")


def _print_findings(diagnosis: Diagnosis, limit: int, roots: Sequence[Path] | None) -> None:
    in_full = 1 if diagnosis.findings[0].confidence >= CERTAIN else limit
    for number, finding in enumerate(diagnosis.findings[:in_full], 1):
        _print_finding(number, finding, roots)
    if others := _listed(diagnosis.findings[in_full:limit]):
        print(labelled("also", f"possible: {others}") + "\n")


def _print_unexplained(diagnosis: Diagnosis, limit: int, roots: Sequence[Path] | None) -> None:
    reason = ": no entry explains the first failure" if diagnosis.is_cause_unknown else ""
    print(style(f"no confident match{reason}", bold=True))
    _print_first_failure(diagnosis)
    failures = [failure for failure in diagnosis.failures if failure.line not in diagnosis.observations]
    for failure in failures[:MOST_FAILURES]:
        times = f" ({failure.count:,} times)" if failure.count > 1 else ""
        print(f"   seen     {_cited(failure.line)}{times}")
    if len(failures) > MOST_FAILURES:
        print("            and more: --json has them")
    best = diagnosis.findings[:limit]
    if diagnosis.is_cause_unknown:
        matched = _listed([finding for finding in best if finding.role != "similar"])
        print(labelled("then", f"what followed fits: {matched}"))
    elif best:
        print(labelled("similar", f"at best: {_listed(best)}"))
        print_commands(best[0].id, roots, has_probe=False)
    print()


def _listed(findings: Sequence[Finding]) -> str:
    return ", ".join(f"{finding.id} ({finding.role}, {finding.confidence:.2f})" for finding in findings)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _print_finding(number: int, finding: Finding, roots: Sequence[Path] | None) -> None:
    origin = "" if finding.origin == "built-in" else f" · from {finding.origin}"
    facts = f"{finding.role} · confidence {finding.confidence:.2f} · {finding.status}{origin}"
    print(headline(number, finding.title, finding.id, facts))
    print(labelled("cause", finding.cause))
    for line in finding.evidence[:MOST_LINES]:
        _print_line("line", line)
    if finding.count > min(len(finding.evidence), MOST_LINES):
        ranks = f", of {name_ranks(finding.ranks)}" if finding.ranks else ""
        print(f"            {finding.count:,} lines in all{ranks}")
    for objection in finding.against:
        print(labelled("against", objection))
    print_commands(finding.id, roots, has_probe=bool(finding.probe))
    print()


def _print_first_failure(diagnosis: Diagnosis) -> None:
    ranks = diagnosis.ranks
    line = f"{_time(ranks.first_failure)}{_cited(ranks.first_failure)}" if ranks.first_failure else ""
    rank = f"rank {ranks.failed_first} failed first" if ranks.failed_first is not None else ""
    if line and not rank and len(ranks.known) > 1 and not diagnosis.is_cause_unknown:
        rank = "several ranks failed; order unknown"
    if rank or line:
        print(f"   first    {': '.join(filter(None, (rank, line)))}")


def _print_observations(diagnosis: Diagnosis) -> None:
    if absent := diagnosis.ranks.absent:
        print(f"   absent   {name_ranks(absent)}: did not wait where the others waited")
    for line in diagnosis.observations[:MOST_LINES]:
        _print_line("seen", line)


def _print_line(label: str, line: Line) -> None:
    """A sentence that kb derived from several lines is not cited at one of them."""
    if line.text.startswith(DERIVED_PREFIX):
        print(labelled("inferred", line.text.removeprefix(DERIVED_PREFIX)))
    else:
        print(f"   {label:<8} {_cited(line)}")


def _time(line: Line) -> str:
    """When a line was printed, which is not in its text: as the log has it, in UTC where it names a zone."""
    if line.time is None:
        return ""
    if line.time < SINCE_EPOCH:
        return f"{line.time:.3f} s  "
    return f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d %H:%M:%S}  "


def _cited(line: Line) -> str:
    rank = f" rank {line.rank}" if line.rank is not None else ""
    text = line.text if len(line.text) <= WIDEST_LINE else f"{line.text[:WIDEST_LINE]}…"
    return f"{style(f'{line.place}{rank}', dim=True)}  {text}"
