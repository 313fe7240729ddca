"""Entries in an answer: a title, the id with some facts, and labelled fields, wrapped to the terminal."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from kb.content.languages import Language

from .hints import with_roots
from .labels import label
from .output import style
from .wrapping import hanging, padded

INDENT = 12


def headline(number: int, title: str, entry_id: str, facts: str) -> str:
    """The title of a numbered entry with the id and some facts below it."""
    below = wrapped_on_terminal(f"{entry_id} {facts}", 3).removeprefix(entry_id)
    title = style(wrapped_on_terminal(title, len(f"{number}. ")), bold=True)
    return f"{number}. {title}\n   {style(entry_id, 'cyan')}{style(below, dim=True)}"


def field(name: str, text: str, lang: Language = Language.ENGLISH) -> str:
    """A label in this language and a text to be copied, which is not wrapped: a command or a line of a log."""
    return f"   {padded(label(name, lang), INDENT - 4)} {text}"


def labelled(name: str, text: str, lang: Language = Language.ENGLISH, *, dim: bool = False) -> str:
    """A label in this language and a text whose lines all begin at the same column."""
    return field(name, style(hanging(text, INDENT), dim=dim), lang)


def print_commands(
    entry_id: str, roots: Sequence[Path] | None, lang: Language = Language.ENGLISH, *, has_probe: bool
) -> None:
    """Print the commands that show an entry in this language and verify it."""
    read = with_roots(f"kb show {entry_id}", roots) + (" --lang zh" if lang is Language.CHINESE else "")
    print(field("read", style(read, "green"), lang))
    if has_probe:
        print(field("verify", style(with_roots(f"kb verify {entry_id}", roots), "green"), lang))


def origin_facts(origin: str, lang: Language) -> str:
    """The origin of an entry, to append to its facts; "" for a built-in entry."""
    return "" if origin == "built-in" else f" · {label('from {}', lang).format(origin)}"


def wrapped_on_terminal(text: str, indent: int) -> str:
    """A text wrapped with this indent. In a pipe it stays on one line, which other programs can search."""
    return hanging(text, indent) if sys.stdout.isatty() else text
