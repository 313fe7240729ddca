"""`kb verify`: run an entry's probe on this machine and print the verdict."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import configured_roots
from kb.errors import BadParameter, UsageError

from ..service.delivery import Recipient, ReportOption, send_waiting
from ..terminal.completion import complete_ids
from ..terminal.output import JsonFlag, RootOption, interpreter_of, notice
from ..terminal.session import session
from ..terminal.signals import Interruption, interruption, limited
from ..terminal.verify_output import LATE, ReportLines, exit_code_of, show_plans, show_run

if TYPE_CHECKING:
    from kb.content.catalog import Catalog
    from kb.content.entry import Entry
    from kb.verify.report import Report
    from kb.verify.runner import RunResult
    from kb.verify.session import Session


def verify(
    ids: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ID]...", help="Entries to verify.", autocompletion=complete_ids),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every entry.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan", help="Show what would run, without running it.")] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Point a probe at your numbers or files. Repeatable."),
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Interpreter of your training environment; nothing is installed into it.")
    ] = None,
    repeat: Annotated[
        int, typer.Option(min=0, max=100, help="Run N pairs of arms and judge the counts (0: the probe decides).")
    ] = 0,
    timeout: Annotated[
        float | None, typer.Option(min=1, metavar="SECONDS", help="Deadline for the whole command.")
    ] = None,
    keep_logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Keep the logs and records of every rank there.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Also use GPUs that are busy.")] = False,
    report_to: ReportOption = None,
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Verify an entry here: its control arm must fail with the entry's signature, its treatment must complete.

    Exit codes: 0 verified or clear; 1 exposed, fix-ineffective, inverted, other-failure; 2 bad input;
    3 not-reproduced, inconclusive; 4 not-applicable; 124 deadline; 130 interrupted.
    """
    from kb.content.catalog import load_catalog

    _refuse_under_a_launcher()
    recipient = Recipient.at(report_to)
    if recipient and not ids and not everything and not plan_only:
        return send_waiting(recipient, as_json=as_json)
    end = time.monotonic() + timeout if timeout else None
    with interruption() as interrupted:
        with ExitStack() as stack:
            with limited(timeout, LATE):
                catalog = load_catalog(configured_roots(tuple(roots or ())))
                entries = _select_entries(catalog, ids or [], everything)
                values = _settings(settings or [])
                _make_folder(keep_logs)
                prepared, status = stack.enter_context(
                    session(catalog, entries, values, interpreter_of(python), keep_logs, force=force)
                )
            if plan_only:
                return show_plans(prepared, status, recipient, as_json=as_json)
            as_list = everything or len(entries) > 1
            lines = None if as_json else ReportLines(len(entries), status, roots, as_list=as_list)
            run = _run(prepared, interrupted, lines, repeat, end)
        return show_run(run, recipient, as_json=as_json, as_list=as_list)


def verify_quietly(
    ids: list[str], python: Path | None, roots: tuple[Path, ...], *, as_json: bool
) -> tuple[int, RunResult]:
    """Return the exit code and reports of these entries. Prints each report when it is ready, unless `as_json`."""
    from kb.content.catalog import load_catalog

    _refuse_under_a_launcher()
    with interruption() as interrupted:
        catalog = load_catalog(configured_roots(roots))
        entries = [catalog.get(entry_id) for entry_id in ids]
        with session(catalog, entries, {}, interpreter_of(python)) as (prepared, status):
            lines = None if as_json else ReportLines(len(entries), status, roots, as_list=True)
            run = _run(prepared, interrupted, lines)
    return exit_code_of(run), run


def _run(
    prepared: Session,
    interrupted: Interruption,
    lines: ReportLines | None,
    repeat: int = 0,
    end: float | None = None,
) -> RunResult:
    """Verify the entries of the session, printing each report when it is ready unless `lines` is None."""
    from kb.verify.runner import RunOptions

    def on_report(report: Report) -> None:
        if lines:
            lines.print(report)

    left = max(0.001, end - time.monotonic()) if end else None
    with interrupted.deferred():
        return prepared.run(RunOptions(repeat, left, lambda: interrupted.is_requested, on_report))


def _refuse_under_a_launcher() -> None:
    """Raise `UsageError` under torchrun or srun, which start a command once per rank: a probe starts its own ranks."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "0") not in ("", "0"):
            raise UsageError(
                f"this is rank {os.environ[name]} of another launcher ({name} is set)",
                "run `kb verify` once per machine, outside torchrun, srun or mpirun",
            )


def _select_entries(catalog: Catalog, ids: list[str], everything: bool) -> list[Entry]:
    if everything == bool(ids):
        raise UsageError(
            "name the entries to verify, or pass --all" if not ids else "either ids or --all, not both",
            "for instance: kb verify checkpoint-save-allgather-timeout",
        )
    if everything:
        for problem in catalog.problems:
            notice(f"left out: {problem.message}")
        return catalog.current()
    return [catalog.get(entry_id) for entry_id in dict.fromkeys(ids)]


def _settings(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadParameter(f"--set {pair}: expected KEY=VALUE", "for instance: --set world_size=7")
        values[key.strip()] = value
    return values


def _make_folder(keep_logs: Path | None) -> None:
    """Create the folder before anything runs, so that an unwritable folder does not look like a failed arm."""
    try:
        if keep_logs:
            keep_logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep-logs {keep_logs}: {error.strerror}", "name a folder that can be written") from error
