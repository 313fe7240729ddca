"""`kb list`: the entries by area, optionally filtered by tag, framework, status or area."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from kb.content.area import Area
from kb.content.filters import Filter
from kb.content.roots import configured_roots
from kb.records.hardware import add_gpu_summaries
from kb.records.releases import add_releases, not_verified
from kb.search.index_cache import open_index

from ..terminal.fields import wrapped_on_terminal
from ..terminal.filter_options import AreaOption, FrameworkOption, StatusOption, TagOption
from ..terminal.output import JsonFlag, RootOption, emit, notice, style
from ..terminal.pager import NoPagerFlag, print_paged
from ..terminal.wrapping import columns

FACTS = "{:<9} {:<8}"  # status and severity
NARROWEST_TITLE = 40  # columns left by id and facts; with fewer, the title gets separate lines
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
    "releases",
    "cause",
)


def list_(
    tag: TagOption = None,
    framework: FrameworkOption = None,
    status: StatusOption = None,
    area: AreaOption = None,
    no_pager: NoPagerFlag = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """List the entries. Exit code 0 when at least one is listed, 1 when none matches."""
    chosen = configured_roots(tuple(roots or ()))
    with open_index(chosen, notice) as index:
        documents = Filter.of(tag, framework, status, area).listed(document for _, document in index.documents())
    documents.sort(key=lambda document: str(document["id"]))
    add_gpu_summaries(documents, chosen)
    add_releases(documents, chosen)
    if as_json:
        emit("list", entries=[{key: document[key] for key in KEYS} for document in documents])
    else:
        print_paged("\n".join(_lines(documents)), no_pager=no_pager)
    return 0 if documents else 1


def _lines(documents: list[dict[str, Any]]) -> Iterator[str]:
    """The lines of a list: one per entry in a pipe, with wrapped titles on a terminal."""
    width = max((len(document["id"]) for document in documents), default=0)
    indent = width + len(f"    {FACTS.format('', '')}  ")
    is_narrow = sys.stdout.isatty() and columns() - indent < NARROWEST_TITLE
    for heading, entries in _by_area(documents):
        yield style(wrapped_on_terminal(heading, 0), bold=True)
        for document in entries:
            entry_id, title = document["id"], document["title"]
            facts = f"{'':{width - len(entry_id)}}  {FACTS.format(document['status'], document['severity'])}"
            if is_narrow:
                beside = wrapped_on_terminal(f"{entry_id}{facts}", 6).removeprefix(entry_id)
                yield f"  {style(entry_id, 'cyan')}{style(beside, dim=True)}\n      {wrapped_on_terminal(title, 6)}"
            else:
                yield f"  {style(entry_id, 'cyan')}{style(facts, dim=True)}  {wrapped_on_terminal(title, indent)}"
            place = 6 if is_narrow else width + 4
            for line in filter(None, [document["hardware"], not_verified(document["releases"])]):
                yield " " * place + style(wrapped_on_terminal(line, place), dim=True)
        yield ""
    if not documents:
        yield "no entry fits. `kb list` without filters shows all."


def _by_area(documents: Iterable[dict[str, Any]]) -> Iterable[tuple[str, Iterable[dict[str, Any]]]]:
    """Group the documents under `area: meaning`, in the order of the areas; those without an area come last."""
    areas = [area.value for area in Area]
    headings = [f"{area}: {area.meaning}" for area in Area] + ["no area"]

    def position(document: dict[str, Any]) -> int:
        return areas.index(document["area"]) if document["area"] else len(areas)

    for place, entries in groupby(sorted(documents, key=position), key=position):
        yield headings[place], entries
