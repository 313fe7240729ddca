"""A tree on a terminal. Each branch is wrapped next to its stem; in a pipe it takes one line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .fields import wrapped_on_terminal
from .output import style


@dataclass(frozen=True, slots=True)
class Branch:
    """A branch with a highlighted `name`, followed by `text`."""

    name: str
    text: str = ""
    color: str = ""
    branches: tuple[Branch, ...] = ()


def tree_lines(tree: Branch, margin: str = "") -> Iterator[str]:
    """The lines of a tree, with two columns per level so that an id fits in a narrow terminal."""
    for number, line in enumerate(wrapped_on_terminal(f"{tree.name}  {tree.text}".rstrip(), len(margin)).splitlines()):
        yield line.strip() if number else style(tree.name, tree.color, dim=not tree.color) + line[len(tree.name) :]
    for number, branch in enumerate(tree.branches, 1):
        is_last = number == len(tree.branches)
        stem = "  " if is_last else "│ "
        first, *others = tree_lines(branch, margin + stem)
        yield f"{'└' if is_last else '├'} {first}"
        yield from (stem + line for line in others)
