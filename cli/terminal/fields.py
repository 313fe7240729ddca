"""Labelled fields: a label in a column of its own, its text beside it."""

from __future__ import annotations

from shutil import get_terminal_size
from textwrap import fill

WIDEST = 110  # characters


def labelled(label: str, text: str) -> str:
    """A label and a text, which is wrapped to the terminal; all its lines begin at the same column."""
    width = min(get_terminal_size().columns, WIDEST)
    return fill(text, width, initial_indent=f"   {label:<8} ", subsequent_indent=" " * 12)
