"""The machine that `kb mcp` runs on, for tools that may look at it: nothing under api/ starts a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from kb import environment
from kb.catalog import Catalog
from kb.check import check_all
from kb.launcher import Launcher
from kb.machine import gpus, installed
from kb.machine.reading import Reader
from kb.plan import make_plan, reject_unknown
from kb.verify import Options

from .planned import Planned
from .progress import StatusLine

CHECKS_S = 120.0  # for all checks together, each of which has 10 s
VERIFY_S = 900.0  # the longest probe takes a third of it


class ThisMachine:
    """A `kb.api.machine.Machine`. `python` is the interpreter of the training environment."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._launcher: Launcher | None = None

    def versions(self) -> Mapping[str, str | None]:
        return installed.versions(self._python)

    def gpu(self) -> str:
        found, _ = gpus.read(Reader())
        return next((one.name for one in found or () if one.name), "")

    def checks(self, found: Catalog) -> list[dict[str, Any]]:
        with self._launching() as launcher:
            watch = Timer(CHECKS_S, launcher.close)
            watch.start()
            try:
                return [answer.to_json() for answer in check_all(found, launcher, {})]
            finally:
                watch.cancel()

    def verify(self, found: Catalog, entry_id: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """The report, which is kept as those of `kb verify` are."""
        entry = found.get(entry_id)
        with self._launching() as launcher:
            machine = environment.capture(self._python)
            plan = make_plan(entry, found.probe_file(entry), launcher, machine, settings)
            reject_unknown(settings, [plan])
            snapshot = {**machine.to_json(), "removed_variables": list(launcher.removed)}
            done = Planned([plan], launcher, snapshot, StatusLine()).run(Options(timeout_s=VERIFY_S))
        return done.reports[0].to_json()

    def stop(self) -> None:
        if launcher := self._launcher:
            launcher.close()

    @contextmanager
    def _launching(self) -> Iterator[Launcher]:
        with Launcher(self._python) as launcher:
            self._launcher = launcher
            try:
                yield launcher
            finally:
                self._launcher = None
