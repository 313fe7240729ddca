"""Commands that an answer hints at: what is pasted must work."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

COMMAND = re.compile(r"\bkb (?:show|verify) [a-z0-9]+(?:-[a-z0-9]+)*")


def with_roots(text: str, roots: Sequence[Path] | None) -> str:
    """The same commands, with the content roots of this one: without them they would not know its entries."""
    if not roots:
        return text
    from shlex import join  # no search imports it otherwise

    given = join(root_options(roots))
    return COMMAND.sub(lambda command: f"{command[0]} {given}", text)


def root_options(roots: Sequence[Path] | None) -> list[str]:
    """The words that name these content roots in a command."""
    return [word for root in roots or () for word in ("--root", str(root))]
