"""`kb show`: one entry, for a terminal, as Markdown or as JSON."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from kb.content.catalog import file_digest
from kb.content.roots import configured_roots
from kb.records.hardware import gpu_summary, proofs
from kb.records.libraries import library_summaries, library_verdicts
from kb.records.releases import experiment_summaries, release_summary, release_verdicts, releases_by_verdict

from ..terminal.completion import complete_ids, complete_sections
from ..terminal.hints import with_roots
from ..terminal.labels import LangOption, language
from ..terminal.output import JsonFlag, RootOption, emit, has_color
from ..terminal.pager import NoPagerFlag, print_paged
from ..terminal.wrapping import columns


def show(
    entry_id: Annotated[
        str,
        typer.Argument(metavar="ID", help="The id of an entry, as `kb search` prints it.", autocompletion=complete_ids),
    ],
    is_whole: Annotated[
        bool,
        typer.Option("--all", help="Show logs, look-alikes, environment, reasons, known cases and references as well."),
    ] = False,
    section: Annotated[
        str,
        typer.Option(
            help="Show only this section, for instance `fix`; a prefix is enough.", autocompletion=complete_sections
        ),
    ] = "",
    lang: LangOption = "en",
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the file as it is written.")] = False,
    no_pager: NoPagerFlag = False,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Read an entry: its cause, how to tell it from others, its fix, and how to verify that fix here."""
    from kb.content.catalog import load_catalog

    from ..terminal.entry_page import short_page, whole_page
    from ..terminal.markdown import Renderer

    spoken = language(lang)
    chosen = configured_roots(tuple(roots or ()))
    catalog = load_catalog(chosen)
    entry = catalog.get(entry_id)
    probe = catalog.probe_file(entry)
    hardware = gpu_summary(probe, proofs(chosen).get(entry.id, ()), entry.digest)
    releases = release_verdicts(chosen).get(entry.id, ())
    libraries = library_verdicts(chosen).get(entry.id, ())
    if as_json:
        emit(
            "show",
            **entry.to_json(),
            probe_file=str(probe) if probe else None,
            hardware=hardware or None,
            releases=releases_by_verdict(releases),
            libraries=[verdict.to_json() for verdict in libraries],
        )
        return 0
    if markdown:
        sys.stdout.write(entry.path.read_text(encoding="utf-8"))
        return 0
    if section:
        heading = entry.heading(section)
        page = f"## {heading}\n\n{entry.section(heading)}\n"
    else:
        digest = file_digest(probe)
        on_record = [hardware, release_summary(releases, digest)]
        page = (
            whole_page(
                entry, spoken, [*on_record, *experiment_summaries(releases), *library_summaries(libraries, digest)]
            )
            if is_whole
            else short_page(entry, spoken, on_record, catalog.entries)
        )
    print_paged(Renderer(columns(), has_color()).render(with_roots(page, roots)), no_pager=no_pager)
    return 0
