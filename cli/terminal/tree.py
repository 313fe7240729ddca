"""A tree on a terminal: each branch wrapped beside its stem, in a pipe on one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import wrapped_on_terminal
from .output import style


@dataclass(frozen=True, slots=True)
class Branch:
    """`name` stands out from the `text` behind it."""

    name: str
    text: str = ""
    color: str = ""
    branches: tuple[Branch, ...] = ()


def tree_lines(tree: Branch, margin: str = "") -> Iterator[str]:
    """Two columns a level, so that an id fits into a narrow terminal."""
    for number, line in enumerate(wrapped_on_terminal(f"{tree.name}  {tree.text}".rstrip(), len(margin)).splitlines()):
        yield line.strip() if number else style(tree.name, tree.color, dim=not tree.color) + line[len(tree.name) :]
    for number, branch in enumerate(tree.branches, 1):
        is_last = number == len(tree.branches)
        stem = "  " if is_last else "│ "
        first, *others = tree_lines(branch, margin + stem)
        yield f"{'└' if is_last else '├'} {first}"
        yield from (stem + line for line in others)
