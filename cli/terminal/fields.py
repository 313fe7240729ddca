"""Entries in an answer: a title, the id with some facts, and labelled fields, wrapped to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .hints import with_roots
from .output import style
from .wrapping import hanging

INDENT = 12


def headline(number: int, title: str, entry_id: str, facts: str) -> str:
    """The title of a numbered entry, and below it the id and some facts."""
    below = wrapped_on_terminal(f"{entry_id} {facts}", 3).removeprefix(entry_id)
    title = style(wrapped_on_terminal(title, len(f"{number}. ")), bold=True)
    return f"{number}. {title}\n   {style(entry_id, 'cyan')}{style(below, dim=True)}"


def labelled(label: str, text: str, *, dim: bool = False) -> str:
    """A label and a text, whose lines all begin at the same column."""
    return f"   {label:<8} {style(hanging(text, INDENT), dim=dim)}"


def print_commands(entry_id: str, roots: Sequence[Path] | None, *, has_probe: bool) -> None:
    """How to read an entry and how to verify it."""
    print(f"   read     {style(with_roots(f'kb show {entry_id}', roots), 'green')}")
    if has_probe:
        print(f"   verify   {style(with_roots(f'kb verify {entry_id}', roots), 'green')}")


def wrapped_on_terminal(text: str, indent: int) -> str:
    """The lines of a text below its first column. In a pipe it stays one line, which other programs can search."""
    return hanging(text, indent) if sys.stdout.isatty() else text
