"""Labelled fields: a label in a column of its own, its text beside it."""

from __future__ import annotations

from .wrapping import hanging

INDENT = 12


def labelled(label: str, text: str) -> str:
    """A label and a text, which is wrapped to the terminal; all its lines begin at the same column."""
    return f"   {label:<8} {hanging(text, INDENT)}"
