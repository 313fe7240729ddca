"""`kb list`: the entries by area, or those with a tag, a framework, a status or an area."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Annotated, Any

import typer

from kb.content.area import Area
from kb.content.filters import Filter
from kb.content.gpu_records import add_gpu_summaries
from kb.content.roots import configured_roots
from kb.search.index_cache import open_index

from ..terminal.output import JsonFlag, RootOption, emit, notice, style

KEYS = (
    "id",
    "title",
    "title_zh",
    "status",
    "severity",
    "area",
    "tags",
    "frameworks",
    "origin",
    "probe",
    "hardware",
    "cause",
)


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
    area: Annotated[
        list[str] | None, typer.Option(help=f"Only entries of this area: {', '.join(Area)}. Repeatable: any of them.")
    ] = None,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """List the entries. Exit code 0 when at least one is listed, 1 when none matches."""
    chosen = configured_roots(tuple(roots or ()))
    with open_index(chosen, notice) as index:
        documents = Filter.of(tag, framework, status, area).listed(document for _, document in index.documents())
    documents.sort(key=lambda document: str(document["id"]))
    add_gpu_summaries(documents, chosen)
    if as_json:
        emit("list", entries=[{key: document[key] for key in KEYS} for document in documents])
    else:
        _print(documents)
    return 0 if documents else 1


def _print(documents: list[dict[str, Any]]) -> None:
    width = max((len(document["id"]) for document in documents), default=0)
    for heading, entries in _by_area(documents):
        print(style(heading, bold=True))
        for document in entries:
            facts = style(f"{document['status']:<9} {document['severity']:<8}", dim=True)
            print(f"  {style(document['id'].ljust(width), 'cyan')}  {facts}  {document['title']}")
            if document["hardware"]:
                print(f"  {'':{width}}  {style(document['hardware'], dim=True)}")
        print()
    if not documents:
        print("no entry fits. `kb list` without filters shows all.")


def _by_area(documents: Iterable[dict[str, Any]]) -> Iterable[tuple[str, Iterable[dict[str, Any]]]]:
    """The documents under `area: its meaning`, in the order of the areas; those without an area come last."""
    areas = [area.value for area in Area]
    headings = [f"{area}: {area.meaning}" for area in Area] + ["no area"]

    def position(document: dict[str, Any]) -> int:
        return areas.index(document["area"]) if document["area"] else len(areas)

    for place, entries in groupby(sorted(documents, key=position), key=position):
        yield headings[place], entries
