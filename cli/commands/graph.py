"""`kb graph`: the causes and consequences of an incident, and what masks it, as a tree."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots

from ..terminal.completion import complete_ids
from ..terminal.output import JsonFlag, RootOption, emit
from ..terminal.tree import Branch, tree_lines

if TYPE_CHECKING:
    from kb.content.causes import Graph

DEPTH = 3  # entries further away do not help anybody to act


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
        print(*tree_lines(_tree(whole, entry_id)), sep="\n")
    return 0


def _tree(whole: Graph, entry_id: str) -> Branch:
    links = [
        Branch(heading, branches=_entries(whole, follow, entry_id, (entry_id,)))
        for heading, follow in (
            ("caused by", whole.causes_of),
            ("causes", whole.consequences_of),
            ("masked by", whole.masked_by),
            ("masks", whole.hides),
        )
        if follow(entry_id)
    ]
    return Branch(entry_id, whole.titles[entry_id], "cyan", tuple(links) or (Branch("no links to other entries"),))


def _entries(
    whole: Graph, follow: Callable[[str], tuple[str, ...]], at: str, path: tuple[str, ...]
) -> tuple[Branch, ...]:
    """The branches below `at`; an entry that is its own ancestor ends its branch."""
    return tuple(
        Branch(
            entry_id,
            whole.titles[entry_id],
            "cyan",
            _entries(whole, follow, entry_id, (*path, entry_id)) if entry_id not in path and len(path) < DEPTH else (),
        )
        for entry_id in follow(at)
    )
