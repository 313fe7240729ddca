"""`kb diagnose`: the entries that explain the logs and dumps of a failed job."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError
from kb.search.index import open_index

from ..terminal.output import JsonFlag, RootOption, emit, notice, style
from ..terminal.stdin import stdin
from .search import wrapped

if TYPE_CHECKING:
    from kb.diagnose.diagnosis import Diagnosis
    from kb.diagnose.evidence import Line
    from kb.diagnose.finding import Finding

SHOWN = 3  # entries
SHOWN_LINES = 3
SHOWN_SEEN = 8
WIDEST_LINE = 160


def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="FILE|DIR|-", help="Logs, flight-recorder dumps, stacks, error files; `-`: stdin."),
    ],
    limit: Annotated[
        int | None, typer.Option(min=1, max=10, help="Show at most this many entries. [default: 3, with --json all]")
    ] = None,
    verify: Annotated[bool, typer.Option("--verify", help="Run the probes of the best candidates here.")] = False,
    python: Annotated[
        Path | None, typer.Option(help="With --verify: interpreter of your training environment.")
    ] = None,
    save_unexplained: Annotated[
        bool, typer.Option("--save-unexplained", help="Keep a redacted excerpt of what no entry explains.")
    ] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Find what made a job fail, from its logs and dumps: the cause before what followed from it.

    Exit code 0 when an entry explains it, 1 when none does; with --verify that of `kb verify`.
    """
    from kb.diagnose.diagnosis import diagnose as conclude
    from kb.diagnose.inputs.sources import sources
    from kb.diagnose.scan.scan import scan
    from kb.diagnose.scan.signature_matcher import Matcher

    from ..terminal.progress import ReadingLine

    if python and not verify:
        raise UsageError("--python says where probes run", "add --verify")
    if "-" in paths:
        stdin()  # there, or a mistake: reading never raises
    chosen = configured_roots(tuple(roots or ()))
    inputs = sources(paths)
    with open_index(chosen, notice) as index, ReadingLine() as reading:
        found = scan(inputs.found, Matcher(index.signatures), reading.read)
        diagnosis = conclude(index, found)
    problems = (*inputs.problems, *diagnosis.problems)
    saved = _save(inputs.found, diagnosis) if save_unexplained and diagnosis.unexplained else None
    document = {**diagnosis.to_json(), "problems": problems, "saved": saved}
    document["findings"] = document["findings"][:limit]
    if as_json and not verify:
        emit("diagnose", **document)
    elif not as_json:
        for problem in problems:
            notice(problem)
        _print(diagnosis, limit or SHOWN)
        if saved:
            print(f"   kept     {saved}\n   then     kb new ID --from {Path(saved).stem} makes an entry of it")
        elif diagnosis.unexplained:
            print(wrapped("keep", "--save-unexplained keeps a redacted excerpt for an entry to be written"))
    if verify:
        return _verify(diagnosis, python, tuple(roots or ()), document if as_json else None)
    return 0 if diagnosis.findings and not diagnosis.unexplained else 1


def _print(diagnosis: Diagnosis, limit: int) -> None:
    is_first_above = diagnosis.unexplained or diagnosis.is_elsewhere
    if diagnosis.unexplained:
        _print_unexplained(diagnosis, limit)
    elif diagnosis.findings:
        if is_first_above:
            _print_first(diagnosis)
            print()
        _print_findings(diagnosis, limit)
    elif diagnosis.bytes:
        lines, files = _counted(diagnosis.lines, "line"), _counted(diagnosis.sources, "file")
        print(f"no line reports a failure in English or Chinese: {lines} of {files} read")
    else:
        print(f"there is nothing to read: {_counted(diagnosis.sources, 'file')} of 0 bytes")
    if not is_first_above:
        _print_first(diagnosis)
    _print_others(diagnosis)
    step = diagnosis.next_step
    if step and step.text:
        print(wrapped("next", step.text.replace("**", "")))
        if step.command:
            print(f"   run      {style(step.command, 'green')}")


def _print_findings(diagnosis: Diagnosis, limit: int) -> None:
    from kb.diagnose.next_step import CERTAIN

    shown = 1 if diagnosis.findings[0].confidence >= CERTAIN else limit
    for number, finding in enumerate(diagnosis.findings[:shown], 1):
        _print_finding(number, finding)
    if others := _listed(diagnosis.findings[shown:limit]):
        print(wrapped("less", f"likely: {others}") + "\n")


def _print_unexplained(diagnosis: Diagnosis, limit: int) -> None:
    said = "what failed first" if diagnosis.is_elsewhere else "this with any confidence"
    print(style(f"not known: no entry explains {said}", bold=True))
    _print_first(diagnosis)
    seen = [failure for failure in diagnosis.seen if failure.line not in diagnosis.observations]
    for failure in seen[:SHOWN_SEEN]:
        times = f" ({failure.count:,} times)" if failure.count > 1 else ""
        print(f"   seen     {_cited(failure.line)}{times}")
    if len(seen) > SHOWN_SEEN:
        print("            and more: --json has them")
    best = diagnosis.findings[:limit]
    if diagnosis.is_elsewhere:
        followed = _listed(tuple(finding for finding in best if finding.role != "similar"))
        print(wrapped("then", f"what followed fits: {followed}"))
    elif best:
        print(wrapped("alike", f"at best: {_listed(best)}"))
    print()


def _listed(findings: tuple[Finding, ...]) -> str:
    return ", ".join(f"{finding.id} ({finding.role}, {finding.confidence:.2f})" for finding in findings)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _print_finding(number: int, finding: Finding) -> None:
    from kb.harness.collective import name_ranks

    origin = "" if finding.origin == "built-in" else f" · from {finding.origin}"
    standing = f"{finding.role} · confidence {finding.confidence:.2f} · {finding.status}{origin}"
    print(f"{number}. {style(finding.title, bold=True)}")
    print(f"   {style(finding.id, 'cyan')} {style(standing, dim=True)}")
    print(wrapped("cause", finding.cause))
    for line in finding.evidence[:SHOWN_LINES]:
        _print_line("line", line)
    if finding.count > min(len(finding.evidence), SHOWN_LINES):
        ranks = f", of {name_ranks(finding.ranks)}" if finding.ranks else ""
        print(f"            {finding.count:,} lines in all{ranks}")
    for objection in finding.against:
        print(wrapped("against", objection))
    print(
        f"   prove    {style(f'kb verify {finding.id}', 'green')}"
        if finding.probe
        else f"   read     kb show {finding.id}"
    )
    print()


def _print_first(diagnosis: Diagnosis) -> None:
    who = diagnosis.ranks
    cited = f"{_when(who.first)}{_cited(who.first)}" if who.first else ""
    said = f"rank {who.failed} failed first" if who.failed is not None else ""
    if cited and not said and len(who.known) > 1 and not diagnosis.is_elsewhere:
        said = "one of those that failed, which was first is not told"
    if said or cited:
        print(f"   first    {': '.join(filter(None, (said, cited)))}")


def _print_others(diagnosis: Diagnosis) -> None:
    from kb.harness.collective import name_ranks

    if absent := diagnosis.ranks.absent:
        print(f"   absent   {name_ranks(absent)}: did not wait where the others waited")
    for line in diagnosis.observations[:SHOWN_LINES]:
        _print_line("seen", line)


def _print_line(label: str, line: Line) -> None:
    """What kb concluded from several lines stands at none of them."""
    from kb.diagnose.evidence import CONCLUDED

    if line.text.startswith(CONCLUDED):
        print(wrapped("inferred", line.text.removeprefix(CONCLUDED)))
    else:
        print(f"   {label:<8} {_cited(line)}")


def _when(line: Line) -> str:
    """The time of a line, which is not part of its text: as it was printed, in UTC where it names a zone."""
    from kb.diagnose.first_failure import SINCE_EPOCH

    if line.time is None:
        return ""
    if line.time < SINCE_EPOCH:
        return f"{line.time:.3f} s  "
    return f"{datetime.fromtimestamp(line.time, UTC):%Y-%m-%d %H:%M:%S}  "


def _cited(line: Line) -> str:
    rank = f" rank {line.rank}" if line.rank is not None else ""
    text = line.text if len(line.text) <= WIDEST_LINE else f"{line.text[:WIDEST_LINE]}…"
    return f"{style(f'{line.place}{rank}', dim=True)}  {text}"


def _save(inputs: tuple[Any, ...], diagnosis: Diagnosis) -> str:
    from kb.authoring import unexplained_queue

    lines = [f"{failure.line.source}:{failure.line.number}: {failure.line.text}" for failure in diagnosis.seen]
    seen = [line.text for line in diagnosis.observations]
    return str(unexplained_queue.save("\n".join(lines), [source.name for source in inputs], seen))


def _verify(diagnosis: Diagnosis, python: Path | None, roots: tuple[Path, ...], document: dict[str, Any] | None) -> int:
    """The probes of the best candidates; under `--json` their reports join the one document.

    Of what is unexplained none is a candidate.
    """
    from kb.diagnose.next_step import candidates

    from .verify import verify_quietly

    likely = () if diagnosis.unexplained else candidates(diagnosis.findings)
    ids = [finding.id for finding in likely if finding.probe]
    if not ids:
        notice("there is nothing to verify: no entry with a probe explains this")
    code, reports, counts = verify_quietly(ids, python, roots) if ids else (1, [], {})
    if document is not None:
        emit("diagnose", **document, reports=[report.to_json() for report in reports], summary=counts)
    else:
        from ..terminal.verdicts import print_report

        print()
        for report in reports:
            print_report(report, is_short=True)
    return code
