"""`kb redact`: a filter that replaces secrets, people and machines in a log with placeholders."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from kb.errors import UsageError

from ..terminal.progress import ReadingLine
from ..terminal.stdin import stdin


def redact(
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="A log; `-` is standard input.")] = "-",
) -> int:
    """Print a log with placeholders for secrets, user names, hosts and addresses; equal values get the same one."""
    from kb.redaction.redactor import local_redactor

    reading = ReadingLine(is_shown=not sys.stdout.isatty())  # on a terminal the log itself shows the progress
    with _opened(file) as stream, open(sys.stdout.fileno(), "wb", closefd=False) as out, reading:
        try:
            for line in local_redactor().lines(stream):
                reading.read(len(line))
                out.write(line)
                out.flush()  # `tail -f train.log | kb redact` shows each line at once
        except BrokenPipeError:  # the reader closed the pipe, as `head` does
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
    return 0


def _opened(file: str) -> BinaryIO:
    if file == "-":
        return open(stdin().fileno(), "rb", closefd=False)
    try:
        return Path(file).expanduser().open("rb")
    except OSError as error:
        raise UsageError(f"{file}: {error.strerror}", "name a log, or `-` for standard input") from error
