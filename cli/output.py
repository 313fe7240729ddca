"""What commands share in speaking: one JSON document on stdout under `--json`, diagnostics on stderr.

Envelope: `{"schema": "kb.<command>.v1", "ok": bool, ...}`; an error adds `{"error": {"type", "message", "hint"}}`.
"""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from kb.errors import KbError

JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RootOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--root", help="Another content root (a folder with entries/ and probes/). Repeatable; KB_ROOTS does the same."
    ),
]


def interpreter_of(python: Path | None) -> Path:
    """The given interpreter, or ours. Not resolved: a virtual environment's python is a link that matters."""
    if python is None:
        return Path(sys.executable)
    return python.expanduser().absolute()


def shown(path: Path) -> Path:
    """Relative to the working directory when it lies below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


class PatientStdout(io.TextIOBase):
    """Standard output for `kb ... | head`: when the reader leaves, the rest is dropped and the exit code stays true.

    Left to itself, Typer ends with 1 and the interpreter with 120, whatever the verdict was.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except BrokenPipeError:
            return self._drop(len(text))

    def flush(self) -> None:
        try:
            self._stream.flush()
        except BrokenPipeError:
            self._drop(0)

    def _drop(self, written: int) -> int:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        return written

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here, as it is in TextIOWrapper
        return self._stream.encoding


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
