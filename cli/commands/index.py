"""`kb index`: build the search index now; a search also does it when the index is stale."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Annotated

import typer

from kb.content.roots import configured_roots
from kb.search.index_cache import home, open_index

from ..terminal.output import JsonFlag, RootOption, emit
from ..terminal.progress import StatusLine


def index(
    force: Annotated[bool, typer.Option("--force", help="Rebuild it even if it is up to date.")] = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Build the search index. Normally not needed: `kb search` does it when an entry has changed."""
    chosen = configured_roots(tuple(roots or ()))
    with ExitStack() as stack:
        with StatusLine() as status:
            status.begin("index", "building the search index")
            opened = stack.enter_context(open_index(chosen, status.notify, force=force))
        count, problems = len(opened), opened.problems
    if as_json:
        emit("index", entries=count, path=str(home(chosen)), problems=problems)
    else:
        print(f"{count} entries in {home(chosen)}")
    return 1 if problems else 0
