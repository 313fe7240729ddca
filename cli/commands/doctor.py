"""`kb doctor`: is kb itself in order? Each finding with its mend."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kb.content.roots import configured_roots

from ..terminal.output import JsonFlag, RootOption, emit, interpreter_of, style


def doctor(
    python: Annotated[Path | None, typer.Option(help="The interpreter that probes shall run in.")] = None,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Check kb itself: index, store, clashing names, torch for the probes, leftovers.

    Exit code 0 when all is in order, 1 when something needs mending.
    """
    from kb.doctor import examine

    findings = []
    for finding in examine(configured_roots(tuple(roots or ())), interpreter_of(python)):
        findings.append(finding)
        if not as_json:
            mark = style("ok  ", "green") if finding.is_fine else style("mend", "yellow", bold=True)
            print(f"{mark}  {finding.subject:<10} {finding.message}")
            if finding.mend:
                print(f"                 {finding.mend}")
    if as_json:
        emit("doctor", findings=[asdict(finding) for finding in findings])
    return 0 if all(finding.is_fine for finding in findings) else 1
