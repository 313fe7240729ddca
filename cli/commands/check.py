"""`kb check`: a preflight that shows what this machine, environment or configuration is exposed to."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError

from ..terminal.completion import complete_ids
from ..terminal.hints import with_roots
from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, style

if TYPE_CHECKING:
    from kb.content.entry import Entry
    from kb.verify.checks import CheckResult

NAGIOS_OK, NAGIOS_WARNING, NAGIOS_CRITICAL, NAGIOS_UNKNOWN = range(4)
NAMES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


class Format(StrEnum):
    TEXT = "text"
    NAGIOS = "nagios"


def check(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Only the checks of these entries.", autocompletion=complete_ids),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A DeepSpeed, accelerate or trainer configuration to check.")
    ] = None,
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    form: Annotated[Format, typer.Option("--format", help="Output format.")] = Format.TEXT,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Run all checks, or the given ones: what are this machine and environment exposed to? Read-only: no arm, no GPU.

    Exit codes: 0 nothing is exposed; 1 something is; 3 the checks could not tell. With --format nagios, the codes of
    a Nagios plugin: 2 for an incident that kills jobs or loses checkpoints, 1 for a lesser one, 3 unknown.
    """
    from kb.content.catalog import load_catalog
    from kb.harness.launcher import Launcher
    from kb.verify.checks import check_entries, exit_code

    if config is not None and not config.is_file():
        raise UsageError(
            f"--config {config}: no such file", "name a configuration of DeepSpeed, accelerate or a trainer"
        )
    catalog = load_catalog(configured_roots(tuple(roots or ())))
    named = [catalog.get(entry_id) for entry_id in dict.fromkeys(ids or ())]
    entries = named or catalog.current()
    files = {"config": config.absolute()} if config else {}
    with Launcher(interpreter_of(python)) as launcher:
        results = check_entries(catalog, entries, launcher, files)
    _refuse_without_check(named, results)
    if as_json:
        emit("check", answers=[result.to_json() for result in results], counts=_counts(results))
    elif form is Format.NAGIOS:
        code = _nagios_code(results, exit_code(results))
        print(_nagios(results, code))
        return code
    else:
        _print(results, roots, everything=bool(named))
        if python is None and any(result.finding.state == "unknown" for result in results):
            print("to check your training environment: kb check --python /path/to/your/training/env/bin/python")
    return exit_code(results)


def _refuse_without_check(named: list[Entry], results: tuple[CheckResult, ...]) -> None:
    """Raise `UsageError` for a named entry without a check: silence would look like a pass."""
    checked = {result.entry.id for result in results}
    if without := [entry.id for entry in named if entry.id not in checked]:
        raise UsageError(f"{without[0]} has no check", f"run its probe instead: kb verify {without[0]}")


def _counts(results: tuple[CheckResult, ...]) -> dict[str, int]:
    counts = Counter(result.finding.state for result in results)
    return {state: counts[state] for state in ("exposed", "clear", "unknown")}


def _print(results: tuple[CheckResult, ...], roots: list[Path] | None, *, everything: bool) -> None:
    """Print what is exposed and each result about a given file; most other checks have nothing to examine."""
    for result in results:
        if everything or result.is_exposed or result.takes_given_file:
            _print_result(result, roots)
    totals = ", ".join(f"{count} {state}" for state, count in _counts(results).items())
    print(f"{totals}; `kb check --json` gives the reasons of all")


def _print_result(result: CheckResult, roots: list[Path] | None) -> None:
    from kb.verify.advice import with_command

    state, entry = result.finding.state, result.entry
    color = {"exposed": "red", "clear": "green"}.get(state, "yellow")
    print(f"{style(f'{state:<8}', color, bold=True)} {style(entry.id, bold=True)}  {entry.meta.title}")
    for line in result.finding.evidence:
        print(f"  {line}")
    if result.finding.advice:
        print(f"  do: {with_roots(with_command(result.finding.advice, entry.id), roots)}")
    if result.is_exposed:
        print(f"  read: {with_roots(f'kb show {entry.id}', roots)}")


def _nagios_code(results: tuple[CheckResult, ...], code: int) -> int:
    severities = {result.entry.meta.severity.value for result in results if result.is_exposed}
    if severities & {"critical", "high"}:
        return NAGIOS_CRITICAL
    return NAGIOS_WARNING if severities else NAGIOS_OK if code == 0 else NAGIOS_UNKNOWN


def _nagios(results: tuple[CheckResult, ...], code: int) -> str:
    """One line with performance data: https://nagios-plugins.org/doc/guidelines.html."""
    exposed = [
        f"{result.entry.id} ({next(iter(result.finding.evidence), '')})" for result in results if result.is_exposed
    ]
    problems = "; ".join(exposed) or "nothing exposed"
    data = " ".join(f"{state}={count}" for state, count in _counts(results).items())
    return f"KB {NAMES[code]} - {problems.replace('|', '/')} | {data}"
