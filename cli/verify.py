"""`kb verify`: run an entry's probe on this machine and say what it proved."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kb import root
from kb.errors import BadParameter, DeadlineExceeded, StoreUnavailable, UsageError

from .output import JsonFlag, RootOption, emit, emit_error, interpreter_of, notice

if TYPE_CHECKING:
    from kb.catalog import Catalog
    from kb.entry import Entry
    from kb.launcher import Launcher
    from kb.plan import Plan
    from kb.report import Report
    from kb.verify import Options, Progress, Run


def verify(
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Entries to verify.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Verify every entry.")] = False,
    plan_only: Annotated[bool, typer.Option("--plan", help="Show what would run, run nothing.")] = False,
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
    as_json: JsonFlag = False,
    roots: RootOption = None,
) -> int:
    """Prove an entry here: its control arm must fail with the entry's signature, its treatment must complete.

    Exit codes: 0 verified or clear; 1 exposed, fix-ineffective, inverted, other-failure; 2 bad input;
    3 not-reproduced, inconclusive; 4 not-applicable; 124 deadline; 130 interrupted.
    """
    from kb import catalog
    from kb.verify import Options

    _refuse_under_a_launcher()
    found = catalog.load(root.configured(tuple(roots or ())))
    entries = _chosen(found, ids or [], everything)
    values = _settings(settings or [])
    _make_folder(keep_logs)
    with _planned(found, entries, values, interpreter_of(python), keep_logs, force=force) as planned:
        if plan_only:
            return _show_plans(planned.plans, planned.launcher, planned.launcher.python, as_json=as_json)
        done = planned.run(Options(repeat, timeout))
    return _show_reports(done.reports, as_json=as_json, as_list=everything or len(entries) > 1, is_cut=done.is_cut)


def verify_quietly(
    ids: list[str], python: Path | None, roots: tuple[Path, ...]
) -> tuple[int, tuple[Report, ...], dict[str, int]]:
    """(exit code, reports, verdicts counted) of these entries; prints nothing but progress."""
    from kb import catalog
    from kb.report import exit_code, summary
    from kb.verify import Options

    _refuse_under_a_launcher()
    found = catalog.load(root.configured(roots))
    with _planned(found, [found.get(one) for one in ids], {}, interpreter_of(python), None) as planned:
        done = planned.run(Options(0, None))
    return exit_code(done.reports), done.reports, summary(done.reports)


@dataclass(frozen=True, slots=True)
class _Planned:
    """What was asked for, ready to run, while its launcher is up."""

    plans: list[Plan]
    launcher: Launcher
    snapshot: dict[str, Any]
    progress: Progress

    def run(self, options: Options) -> Run:
        """Run and keep the reports."""
        from kb.verify import verify as run

        done = run(self.plans, self.launcher, self.snapshot, options, self.progress)
        _save(done.reports)
        return done


@contextmanager
def _planned(
    found: Catalog,
    entries: list[Entry],
    values: dict[str, str],
    interpreter: Path,
    keep_logs: Path | None,
    *,
    force: bool = False,
) -> Iterator[_Planned]:
    from kb import environment
    from kb.launcher import Launcher
    from kb.plan import make_plan, reject_unknown

    from .progress import StatusLine

    with _terminable(), StatusLine() as progress, Launcher(interpreter, keep_logs) as launcher:
        progress.begin("plan", "looking at this machine")
        machine = environment.capture(interpreter)
        plans = [make_plan(entry, found.probe_file(entry), launcher, machine, values, force=force) for entry in entries]
        progress.end("plan")
        reject_unknown(values, plans)
        snapshot = {**machine.to_json(), "removed_variables": list(launcher.removed)}
        yield _Planned(plans, launcher, snapshot, progress)


def _refuse_under_a_launcher() -> None:
    """torchrun and srun start a command once per rank; a probe starts its own ranks."""
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "0") not in ("", "0"):
            raise UsageError(
                f"this is rank {os.environ[name]} of another launcher ({name} is set)",
                "run `kb verify` once per machine, outside torchrun, srun or mpirun",
            )


def _chosen(found: Catalog, ids: list[str], everything: bool) -> list[Entry]:
    if everything == bool(ids):
        raise UsageError(
            "name the entries to verify, or say --all" if not ids else "either ids or --all, not both",
            "for instance: kb verify checkpoint-save-allgather-timeout",
        )
    if everything:
        for problem in found.problems:
            notice(f"left out: {problem.message}")
        return found.current()
    return [found.get(entry_id) for entry_id in dict.fromkeys(ids)]


def _settings(pairs: list[str]) -> dict[str, str]:
    values = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise BadParameter(f"--set {pair}: expected KEY=VALUE", "for instance: --set world_size=7")
        values[key.strip()] = value
    return values


def _make_folder(keep_logs: Path | None) -> None:
    """Before anything runs: logs that cannot be kept are the caller's mistake, not a failure of an arm."""
    try:
        if keep_logs:
            keep_logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"--keep-logs {keep_logs}: {error.strerror}", "name a folder that can be written") from error


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends a verification as Ctrl-C does: arms first, then the command, with code 130."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _save(reports: tuple[Report, ...]) -> None:
    """Into the store; a store that cannot be written costs the record, never the verdict."""
    from kb.store import reports as kept
    from kb.store.database import Database

    try:
        with Database.open() as database:
            kept.save(database, [report.to_json() for report in reports])
    except StoreUnavailable as error:
        notice(f"this report is not kept: {error.message}")


def _show_reports(reports: tuple[Report, ...], *, as_json: bool, as_list: bool, is_cut: bool) -> int:
    from kb.report import exit_code, summary

    from .render import print_report, print_summary

    documents = [report.to_json() for report in reports]
    late = DeadlineExceeded("the overall deadline came before every entry was done", "give more time with --timeout")
    body: Mapping[str, Any] = {"reports": documents, "summary": summary(reports)} if as_list else documents[0]
    if as_json and is_cut:
        emit_error("verify", late, **body)
    elif as_json:
        emit("verify", **body)
    else:
        for report in reports:
            print_report(report, is_short=as_list)
        if as_list:
            print_summary(summary(reports))
        if is_cut:
            notice(late.message)
    return late.exit_code if is_cut else exit_code(reports)


def _show_plans(plans: list[Plan], launcher: Launcher, python: Path, *, as_json: bool) -> int:
    from .render import print_plan

    if as_json:
        emit(
            "verify-plan",
            python=str(python),
            removed_variables=list(launcher.removed),
            plans=[one.to_json() for one in plans],
        )
        return 0
    for one in plans:
        print_plan(one)
    print(f"interpreter  {python}")
    print("files        one temporary directory per arm, deleted afterwards; the report goes into the store")
    print(f"environment  yours, without {', '.join(launcher.removed) or 'any change'}")
    return 0
