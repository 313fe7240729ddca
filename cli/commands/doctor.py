"""`kb doctor`: health checks of kb itself, each with a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kb.content.roots import configured_roots

from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, style


def doctor(
    python: Annotated[Path | None, typer.Option(help="Interpreter of your training environment.")] = None,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Run health checks of kb itself: index, store, clashing names, torch for the probes, leftovers.

    Exit code 0 when all of them pass, 1 when something needs fixing.
    """
    from kb.doctor import run_checks

    checks = []
    chosen = configured_roots(tuple(roots or ()))
    for check in run_checks(chosen, interpreter_of(python), is_named=python is not None):
        checks.append(check)
        if not as_json:
            label = style("ok  ", "green") if check.is_fine else style("fix ", "yellow", bold=True)
            print(f"{label}  {check.subject:<10} {check.message}")
            if check.hint:
                print(f"                 {check.hint}")
    if as_json:
        emit("doctor", findings=[check.to_json() for check in checks])
    return 0 if all(check.is_fine for check in checks) else 1
