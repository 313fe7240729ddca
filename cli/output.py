"""What commands share in speaking: one JSON document on stdout under `--json`, diagnostics on stderr.

Envelope: `{"schema": "kb.<command>.v1", "ok": bool, ...}`; an error adds `{"error": {"type", "message", "hint"}}`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kb.errors import KbError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RootOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--root", help="Another content root (a folder with entries/ and probes/). Repeatable; KB_ROOTS does the same."
    ),
]


def emit(command: str, *, ok: bool = True, **fields: Any) -> None:
    """Print the envelope of a command."""
    document = {"schema": f"kb.{command}.v1", "ok": ok, **fields}
    print(json.dumps(document, ensure_ascii=False, indent=2 if sys.stdout.isatty() else None, default=str))


def emit_error(command: str, error: KbError, **fields: Any) -> None:
    emit(command, ok=False, error={"type": error.kind, "message": error.message, "hint": error.hint or None}, **fields)


def notice(text: str) -> None:
    """A diagnostic for a person: stderr, never stdout."""
    print(f"kb: {text}", file=sys.stderr)


def complain(error: KbError) -> None:
    """An error for a person: what happened, and what to do next."""
    print(f"{style('error:', 'red', on=sys.stderr)} {error.message}", file=sys.stderr)
    if error.hint:
        print(f"{style('hint:', 'cyan', on=sys.stderr)}  {error.hint}", file=sys.stderr)


def style(text: str, color: str = "", *, bold: bool = False, dim: bool = False, on: Any = None) -> str:
    """Colour on a terminal, plain text elsewhere; NO_COLOR and FORCE_COLOR are honoured (no-color.org)."""
    stream = on or sys.stdout
    wanted = bool(os.environ.get("FORCE_COLOR")) or (stream.isatty() and not os.environ.get("NO_COLOR"))
    return typer.style(text, fg=color or None, bold=bold or None, dim=dim or None) if wanted else text
