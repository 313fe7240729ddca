"""`kb check`: the preflight. What this machine, environment or configuration is exposed to, before a job finds out."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import UsageError

from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, style

if TYPE_CHECKING:
    from kb.verify.checks import Answer

NAGIOS_OK, NAGIOS_WARNING, NAGIOS_CRITICAL, NAGIOS_UNKNOWN = range(4)
NAMES = ("OK", "WARNING", "CRITICAL", "UNKNOWN")


class Format(StrEnum):
    TEXT = "text"
    NAGIOS = "nagios"


def check(
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A DeepSpeed, accelerate or trainer configuration to judge.")
    ] = None,
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    form: Annotated[Format, typer.Option("--format", help="How to say it.")] = Format.TEXT,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Ask every check what this machine and environment are exposed to. Read-only: no arm runs, no GPU is touched.

    Exit codes: 0 nothing is exposed; 1 something is; 3 the checks could not tell. With --format nagios those of
    a Nagios plugin: 2 when what is exposed kills jobs or loses checkpoints, 1 when it is less, 3 unknown.
    """
    from kb.content.catalog import load_catalog
    from kb.harness.launcher import Launcher
    from kb.verify.checks import check_all, exit_code

    if config is not None and not config.is_file():
        raise UsageError(
            f"--config {config}: there is no such file", "name a file of DeepSpeed, accelerate or a trainer"
        )
    found = load_catalog(configured_roots(tuple(roots or ())))
    files = {"config": config.absolute()} if config else {}
    with Launcher(interpreter_of(python)) as launcher:
        answers = check_all(found, launcher, files)
    if as_json:
        emit("check", answers=[answer.to_json() for answer in answers], counts=_counts(answers))
    elif form is Format.NAGIOS:
        code = _nagios_code(answers, exit_code(answers))
        print(_nagios(answers, code))
        return code
    else:
        _print(answers)
    return exit_code(answers)


def _counts(answers: tuple[Answer, ...]) -> dict[str, int]:
    counts = Counter(answer.finding.state for answer in answers)
    return {state: counts[state] for state in ("exposed", "clear", "unknown")}


def _print(answers: tuple[Answer, ...]) -> None:
    """What is exposed and what was said of a given file; most of the others had nothing to look at."""
    for answer in answers:
        if answer.is_exposed or answer.is_asked:
            _print_answer(answer)
    told = ", ".join(f"{count} {state}" for state, count in _counts(answers).items())
    print(f"{told}; `kb check --json` gives the reasons of all")


def _print_answer(answer: Answer) -> None:
    state, entry = answer.finding.state, answer.entry
    color = {"exposed": "red", "clear": "green"}.get(state, "yellow")
    print(f"{style(f'{state:<8}', color, bold=True)} {style(entry.id, bold=True)}  {entry.meta.title}")
    for line in answer.finding.evidence:
        print(f"  {line}")
    if answer.finding.advice:
        print(f"  do: {answer.finding.advice}")
    if answer.is_exposed:
        print(f"  read: kb show {entry.id}")


def _nagios_code(answers: tuple[Answer, ...], code: int) -> int:
    severities = {answer.entry.meta.severity.value for answer in answers if answer.is_exposed}
    if severities & {"critical", "high"}:
        return NAGIOS_CRITICAL
    return NAGIOS_WARNING if severities else NAGIOS_OK if code == 0 else NAGIOS_UNKNOWN


def _nagios(answers: tuple[Answer, ...], code: int) -> str:
    """One line with performance data, as https://nagios-plugins.org/doc/guidelines.html wants it."""
    exposed = [
        f"{answer.entry.id} ({next(iter(answer.finding.evidence), '')})" for answer in answers if answer.is_exposed
    ]
    told = "; ".join(exposed) or "nothing exposed"
    data = " ".join(f"{state}={count}" for state, count in _counts(answers).items())
    return f"KB {NAMES[code]} - {told.replace('|', '/')} | {data}"
