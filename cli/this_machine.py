"""The machine that `kb mcp` runs on, for tools that may look at it: nothing under api/ starts a process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from threading import Timer
from typing import Any

from kb.content.catalog import Catalog
from kb.harness.launcher import Launcher
from kb.machine import gpus, installed
from kb.runtime.survey_fields import Reader
from kb.verify.checks import check_all
from kb.verify.runner import Options
from kb.verify.session import prepare

from .terminal.output import notice
from .terminal.progress import StatusLine

CHECKS_S = 120.0  # for all checks together, each of which has 10 s
VERIFY_S = 900.0  # the longest probe takes a third of it


class ThisMachine:
    """A `kb.api.mcp.machine.Machine`. `python` is the interpreter of the training environment."""

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
            session = prepare(found, [entry], settings, self._python, launcher, StatusLine(), notice)
            done = session.run(Options(timeout_s=VERIFY_S))
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
