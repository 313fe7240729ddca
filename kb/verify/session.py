"""From entries to saved reports: takes the machine snapshot, plans, runs, saves. CLI and MCP call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kb.content.catalog import Catalog
from kb.content.entry import Entry
from kb.errors import StoreUnavailable
from kb.harness.launcher import Launcher
from kb.machine import snapshot
from kb.verify.plan import Plan, make_plan, reject_unknown
from kb.verify.report import Report
from kb.verify.runner import Progress, RunOptions, RunResult, verify


@dataclass(frozen=True, slots=True)
class Session:
    """Plans that are ready to run while their launcher is open. `environment` is the machine, as in reports."""

    plans: list[Plan]
    launcher: Launcher
    environment: Mapping[str, Any]
    progress: Progress
    notify: Callable[[str], None]

    def run(self, options: RunOptions) -> RunResult:
        """Run every plan and save the reports. Without a writable store the reports are lost, not the verdicts."""
        run = verify(self.plans, self.launcher, self.environment, options, self.progress)
        try:
            _save(run.reports)
        except StoreUnavailable as error:
            self.notify(f"this report is not saved: {error.message}")
        return run


def prepare(
    catalog: Catalog,
    entries: Iterable[Entry],
    settings: Mapping[str, str],
    interpreter: Path,
    launcher: Launcher,
    progress: Progress,
    notify: Callable[[str], None],
    *,
    force: bool = False,
) -> Session:
    """Plan these entries for this machine. Raises `BadParameter` for a setting that no probe declares."""
    progress.begin("plan", "looking at this machine")
    machine = snapshot.capture(interpreter)
    plans = [make_plan(entry, catalog.probe_file(entry), launcher, machine, settings, force=force) for entry in entries]
    progress.end("plan")
    reject_unknown(settings, plans)
    environment = {**machine.to_json(), "removed_variables": list(launcher.removed)}
    return Session(plans, launcher, environment, progress, notify)


def _save(reports: tuple[Report, ...]) -> None:
    # Imported here: SQLModel takes a second, and a plan needs no store.
    from kb.store.database import Database
    from kb.store.reports import save

    with Database.open() as database:
        save(database, [report.to_json() for report in reports])
