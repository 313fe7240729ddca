"""The commands suggested in an answer, completed so that they work when pasted."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

COMMAND = re.compile(r"\bkb (?:show|verify) [a-z0-9]+(?:-[a-z0-9]+)*")


def with_roots(text: str, roots: Sequence[Path] | None) -> str:
    """The text with the content roots of this command added to its commands, which need them to find its entries."""
    if not roots:
        return text
    from shlex import join  # imported here to keep searches fast

    given = join(root_options(roots))
    return COMMAND.sub(lambda command: f"{command[0]} {given}", text)


def root_options(roots: Sequence[Path] | None) -> list[str]:
    """The command-line options for these content roots."""
    return [word for root in roots or () for word in ("--root", str(root))]
