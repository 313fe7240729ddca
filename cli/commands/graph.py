"""`kb graph`: the causes and consequences of an incident, and what masks it, as a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots

from ..terminal.completion import complete_ids
from ..terminal.output import JsonFlag, RootOption, emit

if TYPE_CHECKING:
    from rich.tree import Tree

    from kb.content.causes import Graph

DEPTH = 3  # farther entries help nobody to act
WIDE = 200  # columns in a pipe, so that nothing is cut


def graph(
    entry_id: Annotated[str, typer.Argument(metavar="ID", help="The id of an entry.", autocompletion=complete_ids)],
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Show the neighbours of an entry in the graph of causes."""
    from kb.content.catalog import load_catalog
    from kb.content.causes import graph as graph_of

    catalog = load_catalog(configured_roots(tuple(roots or ())))
    entry_id = catalog.get(entry_id).id
    whole = graph_of(catalog.current())
    if as_json:
        emit("graph", **whole.around(entry_id))
    else:
        _print(whole, entry_id)
    return 0


def _print(whole: Graph, entry_id: str) -> None:
    from rich.console import Console
    from rich.tree import Tree

    tree = Tree(_label(whole, entry_id), highlight=False)
    for heading, follow in (
        ("caused by", whole.causes_of),
        ("causes", whole.consequences_of),
        ("masked by", whole.masked_by),
        ("masks", whole.hides),
    ):
        if follow(entry_id):
            _grow(tree.add(f"[dim]{heading}[/dim]"), whole, follow, entry_id, (entry_id,))
    if not tree.children:
        tree.add("[dim]no links to other entries[/dim]")
    console = Console()
    console.width = console.width if console.is_terminal else WIDE
    console.print(tree)


def _grow(tree: Tree, whole: Graph, follow: Callable[[str], tuple[str, ...]], at: str, path: tuple[str, ...]) -> None:
    """Adds the branches below `at`; an entry that is its own ancestor ends its branch."""
    for entry_id in follow(at):
        branch = tree.add(_label(whole, entry_id))
        if entry_id not in path and len(path) < DEPTH:
            _grow(branch, whole, follow, entry_id, (*path, entry_id))


def _label(whole: Graph, entry_id: str) -> str:
    from rich.markup import escape

    return f"[cyan]{entry_id}[/cyan]  {escape(whole.titles[entry_id])}"
