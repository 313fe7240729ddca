"""From entries to saved reports: takes the machine snapshot, plans, runs, saves. CLI and MCP call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from kb.content.catalog import Catalog
from kb.content.entry import Entry
from kb.errors import LaunchError, StoreUnavailable
from kb.harness.launcher import Launcher
from kb.machine import snapshot
from kb.verify.plan import Plan, make_plan, reject_unknown
from kb.verify.plan_runner import Progress
from kb.verify.report import Report
from kb.verify.runner import RunOptions, RunResult, verify

if TYPE_CHECKING:
    from kb.store.database import Database


@dataclass(frozen=True, slots=True)
class Session:
    """What runs while the launcher is open. `environment` is the machine, as in reports.

    `plans` is read once. Several plans are made one by one as it is read, so the first verdict does not wait for the
    last plan.
    """

    plans: Iterable[Plan]
    launcher: Launcher
    environment: Mapping[str, Any]
    progress: Progress
    notify: Callable[[str], None]

    def run(self, options: RunOptions) -> RunResult:
        """Run every plan and save each report at once. Without a writable store, only verdicts are returned."""
        with _Store(self.notify) as store:
            options = replace(options, on_report=partial(_pass_on_and_save, store, options.on_report))
            return verify(self.plans, self.launcher, self.environment, options, self.progress)


def prepare(
    catalog: Catalog,
    entries: Sequence[Entry],
    settings: Mapping[str, str],
    interpreter: Path,
    launcher: Launcher,
    progress: Progress,
    notify: Callable[[str], None],
    *,
    force: bool = False,
) -> Session:
    """Look at this machine and plan these entries. Raises `BadParameter` for a setting that no probe declares."""
    progress.begin("machine", "looking at this machine")
    machine = snapshot.capture(interpreter)
    progress.end("machine")

    def make(entry: Entry) -> Plan:
        progress.begin("plan", f"{entry.id} plan")
        probe_file = catalog.probe_file(entry)
        try:
            return make_plan(entry, probe_file, launcher, machine, settings, force=force)
        except LaunchError as error:
            if entry is entries[0]:
                raise
            return Plan(entry, probe_file, fault=error.message)  # the others have begun, and their reports are not lost
        finally:
            progress.end("plan")

    plans: Iterable[Plan] = map(make, entries)
    if settings or len(entries) == 1:
        plans = reject_unknown(settings, list(plans))
    environment = {**machine.to_json(), "removed_variables": list(launcher.removed)}
    return Session(plans, launcher, environment, progress, notify)


class _Store:
    """The store of reports, opened by the first report: its library takes a second to import, and a plan needs none."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._open = ExitStack()
        self._database: Database | None = None
        self._has_failed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._open.close()

    def save(self, report: Report) -> None:
        """Save a report; notify once if the store cannot be written."""
        from kb.store.database import Database
        from kb.store.reports import save

        if self._has_failed:
            return
        try:
            self._database = self._database or self._open.enter_context(Database.open())
            save(self._database, [report.to_json()])
        except StoreUnavailable as error:
            self._has_failed = True
            self._notify(f"reports are not saved: {error.message}")


def _pass_on_and_save(store: _Store, pass_on: Callable[[Report], None], report: Report) -> None:
    """Pass on first, so that the first verdict does not wait until the store is open."""
    try:
        pass_on(report)
    finally:
        store.save(report)
