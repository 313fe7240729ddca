"""`kb list`: every entry, or those with a tag, a framework or a status."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from kb.content.filters import Filter
from kb.content.gpu_records import add_standing
from kb.content.roots import configured_roots
from kb.search.index import open_index

from ..terminal.output import JsonFlag, RootOption, emit, notice, style

KEYS = ("id", "title", "title_zh", "status", "severity", "tags", "frameworks", "origin", "probe", "hardware", "cause")


def list_(
    tag: Annotated[list[str] | None, typer.Option(help="Only entries with this tag. Repeatable: all of them.")] = None,
    framework: Annotated[
        list[str] | None, typer.Option(help="Only entries about this package or framework. Repeatable: any of them.")
    ] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="Only entries of this status: confirmed, reported, disputed, withdrawn. Repeatable: any of them."
        ),
    ] = None,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """List the entries. Exit code 0 when there is one, 1 when none fits."""
    chosen = configured_roots(tuple(roots or ()))
    with open_index(chosen, notice) as index:
        found = Filter.of(tag, framework, status).listed(document for _, document in index.documents())
    found.sort(key=lambda document: str(document["id"]))
    add_standing(found, chosen)
    if as_json:
        emit("list", entries=[{key: document[key] for key in KEYS} for document in found])
    else:
        _print(found)
    return 0 if found else 1


def _print(found: list[dict[str, Any]]) -> None:
    width = max((len(document["id"]) for document in found), default=0)
    for document in found:
        state = style(f"{document['status']:<9} {document['severity']:<8}", dim=True)
        print(f"{style(document['id'].ljust(width), 'cyan')}  {state}  {document['title']}")
        if document["hardware"]:
            print(f"{'':{width}}  {style(document['hardware'], dim=True)}")
    if not found:
        print("no entry fits. `kb list` without filters shows all.")
