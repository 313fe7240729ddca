"""A verification that is ready to run: plans, their launcher, and the end that SIGTERM or Ctrl-C gives it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kb.errors import StoreUnavailable

from .output import notice

if TYPE_CHECKING:
    from kb.catalog import Catalog
    from kb.entry import Entry
    from kb.launcher import Launcher
    from kb.plan import Plan
    from kb.report import Report
    from kb.verify import Options, Progress, Run


@dataclass(frozen=True, slots=True)
class Planned:
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
def planned(
    found: Catalog,
    entries: list[Entry],
    values: dict[str, str],
    interpreter: Path,
    keep_logs: Path | None,
    *,
    force: bool = False,
) -> Iterator[Planned]:
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
        yield Planned(plans, launcher, snapshot, progress)


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
