"""A pager for long text on a terminal, chosen as in git: `KB_PAGER`, `PAGER`, then `less`; `cat` means none."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from shutil import get_terminal_size, which
from typing import Annotated

import typer

from .output import has_color, safe
from .wrapping import cells

LESS = "FRX"  # exit if the text fits, show colours, leave the text on the screen

NoPagerFlag = Annotated[bool, typer.Option("--no-pager", help="Print without a pager; so does PAGER=cat.")]


def print_paged(text: str, *, no_pager: bool) -> None:
    """Print a text, through a pager if it is longer than the screen."""
    command = [] if no_pager else _pager()
    if not command or _height(text) < get_terminal_size().lines:
        print(text)
        return
    sys.stdout.flush()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        env={"LESS": LESS, "LV": "-c", **os.environ},
        encoding=sys.stdout.encoding,
        errors="replace",
    ) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pager, which keeps running
        try:
            process.communicate(safe(text, has_color=has_color()) + "\n")  # the reader may leave before the end
        finally:
            signal.signal(signal.SIGINT, before)


def _pager() -> list[str]:
    """The command of the pager; empty if the output is not interactive or no pager is installed."""
    if not (sys.stdin and sys.stdin.isatty() and sys.stdout.isatty()) or os.environ.get("TERM", "dumb") == "dumb":
        return []
    setting = os.environ.get("KB_PAGER", os.environ.get("PAGER", "less"))
    try:
        command = shlex.split(setting)
    except ValueError:
        return []
    return command if command and command != ["cat"] and which(command[0]) else []


def _height(text: str) -> int:
    """The number of lines on the screen, which breaks wider lines."""
    width = get_terminal_size().columns
    return sum(1 + max(0, cells(line) - 1) // width for line in text.splitlines())
