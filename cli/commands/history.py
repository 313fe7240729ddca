"""`kb history`: earlier verdicts on this machine."""

from __future__ import annotations

import datetime
import sys
from shutil import get_terminal_size
from typing import Annotated, Any

import typer

from kb.content.roots import configured_roots

from ..terminal.completion import complete_ids
from ..terminal.fields import wrapped_on_terminal
from ..terminal.output import JsonFlag, RootOption, clock, emit, style

BESIDE_ID = 54  # columns that a line needs in addition to the id, without its mark


def history(
    entry_id: Annotated[
        str | None, typer.Argument(metavar="[ID]", help="Only reports of this entry.", autocompletion=complete_ids)
    ] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="Show at most this many reports.")] = 20,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Show the reports of `kb verify`, newest first. Exit code 0 if there are any, 1 if there are none.

    "earlier wording" means that the entry has been edited since, so the report is about an older text.
    """
    from kb.content.catalog import load_catalog
    from kb.store import reports as store_reports
    from kb.store.database import Database

    catalog = load_catalog(configured_roots(tuple(roots or ())))
    with Database.open() as database:
        documents = store_reports.history(database, entry_id, limit)
    if entry_id and not documents:
        catalog.get(entry_id)
    reports = store_reports.compare_wording(documents, {entry.id: entry.digest for entry in catalog})
    if as_json:
        emit("history", reports=reports)
    elif reports:
        _print(reports)
    else:
        print(f"no report yet. `kb verify {entry_id or 'ID'}` makes one.")
    return 0 if reports else 1


def _print(reports: list[dict[str, Any]]) -> None:
    from kb.verify.verdict import EXIT_CODES

    from ..terminal.reports import COLORS

    colors = {verdict.value: COLORS[code] for verdict, code in EXIT_CODES.items()}
    width = max(len(report["id"]) for report in reports)
    is_narrow = sys.stdout.isatty() and width + BESIDE_ID > get_terminal_size().columns
    for report in reports:
        started = clock(datetime.datetime.fromisoformat(report["started_at"]))
        verdict, fidelity, seconds = report["verdict"], report["fidelity"], f"{report['duration_s']:.1f} s"
        mark = "  earlier wording" if report["earlier_wording"] else ""
        if is_narrow:
            facts = wrapped_on_terminal(f"{started}  {verdict}  {fidelity}  {seconds}{mark}", 2)
            print(f"{report['id']}\n  {facts.replace(verdict, style(verdict, colors.get(verdict, '')), 1)}")
        else:
            verdict = style(f"{verdict:<15}", colors.get(verdict, ""))
            print(f"{started}  {report['id']:<{width}}  {verdict} {fidelity:<9}{seconds:>9}{style(mark, dim=True)}")
