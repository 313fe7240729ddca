"""Output that commands share: one JSON document on stdout under `--json`, diagnostics on stderr.

Envelope: `{"schema": "kb.<command>.v1", "ok": bool, ...}`; an error adds `{"error": {"type", "message", "hint"}}`.
"""

from __future__ import annotations

import datetime
import io
import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from kb.errors import KbError, OutputLost
from kb.printable import HAZARDS, printable

from .wrapping import hanging

OWN_STYLE = re.compile(r"(\x1b\[(?:[0-4]|7|9|3[0-7]|9[0-7]|;)*m)")  # what `style` and Rich write; excludes hidden text
UNSAFE_JSON = re.compile(f"[{HAZARDS}]")
ERASE_LINE = "\r\x1b[K"
JsonFlag = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
RootOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--root", help="Another content root (a folder with entries/ and probes/). Repeatable; KB_ROOTS does the same."
    ),
]


def interpreter_of(python: Path | None) -> Path:
    """The given interpreter, or the one that runs kb. Not resolved: the python of a virtual environment is a link."""
    if python is None:
        return Path(sys.executable)
    return python.expanduser().absolute()


def shown(path: Path) -> Path:
    """The path, relative to the working directory if it is below it."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def clock(moment: datetime.datetime) -> str:
    """A moment with a time zone, in the local time of this machine."""
    return moment.astimezone().strftime("%Y-%m-%d %H:%M")


class SafeStream(io.TextIOBase):
    """A stream that lets only printable text and our colours reach the terminal. All output of a command passes here.

    Write errors are ignored: even if stderr cannot be written, as on a full disk, the exit code must be right.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self.write_unchanged(text if text.isprintable() else safe(text, has_color=has_color(self._stream)))
        return len(text)

    def write_unchanged(self, text: str) -> None:
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        pass

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]  # read-only here, as in TextIOWrapper
        return self._stream.encoding


class PatientStdout(SafeStream):
    """Standard output for `kb ... | head`: when the reader leaves, the rest is dropped and the exit code is kept.

    By default Typer would exit with 1 and the interpreter with 120, whatever the verdict was. Any other write error
    raises `OutputLost`. `has_begun` tells whether something was already written, which cannot be undone.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream)
        self.has_begun = False

    def write_unchanged(self, text: str) -> None:
        self.has_begun = True
        super().write_unchanged(text)

    def _drop(self, error: OSError) -> None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
        if not isinstance(error, BrokenPipeError):
            raise OutputLost(f"standard output cannot be written: {error.strerror}", "is the disk full?") from error


def safe(text: str, *, has_color: bool) -> str:
    """The text with unprintable characters escaped, except for our colours if `has_color`."""
    if not has_color:
        return printable(text)
    parts = OWN_STYLE.split(text)
    return "".join(part if number % 2 else printable(part) for number, part in enumerate(parts))


def claim_streams() -> None:
    """Give every command streams that it can write to.

    Characters that the terminal cannot show are replaced. A stream that was closed when kb started is replaced by one
    that discards everything: otherwise `print` writes diagnostics to stdout, and the next opened file becomes stdout.
    """
    stdout, stderr = sys.stdout or _nowhere(), sys.stderr or _nowhere()
    if isinstance(stdout, io.TextIOWrapper):
        stdout.reconfigure(errors="replace")
    sys.stdout = PatientStdout(stdout)
    sys.stderr = SafeStream(stderr)


def _nowhere() -> TextIO:
    return open(os.devnull, "w", encoding="utf-8")


def emit(command: str, *, ok: bool = True, **fields: Any) -> None:
    """Print the envelope of a command."""
    print_json({"schema": f"kb.{command}.v1", "ok": ok, **fields}, indent=2 if sys.stdout.isatty() else None)


def print_json(document: Any, indent: int | None) -> None:
    """Print JSON as UTF-8 (RFC 8259). If stdout is not UTF-8 or the text not valid Unicode, escape all but ASCII."""
    text = UNSAFE_JSON.sub(_json_escape, json.dumps(document, ensure_ascii=False, indent=indent, default=str))
    print(text if _is_utf8(text) else json.dumps(document, indent=indent, default=str))


def _json_escape(match: re.Match[str]) -> str:
    """A character as a JSON escape, which is equal for a program and which a terminal does not interpret."""
    return json.dumps(match.group())[1:-1]


def _is_utf8(text: str) -> bool:
    """Whether stdout writes this text as UTF-8."""
    try:
        return text.encode(sys.stdout.encoding or "utf-8") == text.encode()
    except UnicodeEncodeError:
        return False


def emit_error(command: str, error: KbError, **fields: Any) -> None:
    emit(command, ok=False, error={"type": error.kind, "message": error.message, "hint": error.hint or None}, **fields)


def notice(text: str) -> None:
    """Print a diagnostic for a person, on stderr."""
    _say(f"kb: {text}")


def complain(error: KbError) -> None:
    """Print an error for a person: what happened, and what to do next."""
    _say(f"{style('error:', 'red', on=sys.stderr)} {error.message}")
    if error.hint:
        label = style("hint:", "cyan", on=sys.stderr)
        _say(f"{label}  {hanging(error.hint, 7) if sys.stderr.isatty() else error.hint}")


def draw(text: str) -> None:
    """Replace the current line of stderr, if it is a terminal."""
    write = getattr(sys.stderr, "write_unchanged", sys.stderr.write)
    write(f"{ERASE_LINE}{printable(text)}")
    sys.stderr.flush()


def _say(line: str) -> None:
    print(line, file=sys.stderr)


def style(text: str, color: str = "", *, bold: bool = False, dim: bool = False, on: Any = None) -> str:
    """Coloured text on a terminal, plain text elsewhere. Honours NO_COLOR and FORCE_COLOR (no-color.org)."""
    return typer.style(text, fg=color or None, bold=bold or None, dim=dim or None) if has_color(on) else text


def has_color(stream: Any = None) -> bool:
    """Whether a stream, by default stdout, gets colours."""
    return bool(os.environ.get("FORCE_COLOR")) or ((stream or sys.stdout).isatty() and not os.environ.get("NO_COLOR"))
