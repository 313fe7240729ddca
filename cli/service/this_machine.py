"""The machine that `kb mcp` runs on, for tools that read it or verify on it. Nothing under api/ starts a process."""

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
from kb.verify.checks import check_entries
from kb.verify.runner import RunOptions
from kb.verify.session import prepare

from ..terminal.output import notice
from ..terminal.progress import StatusLine

CHECKS_S = 120.0  # for all checks together; each may take 10 s
VERIFY_S = 900.0  # the longest probe takes a third of that


class ThisMachine:
    """A `kb.api.mcp.machine.Machine`. `python` is the interpreter of the training environment."""

    def __init__(self, python: Path) -> None:
        self._python = python
        self._launcher: Launcher | None = None

    def versions(self) -> Mapping[str, str | None]:
        return installed.versions(self._python)

    def gpu(self) -> str:
        gpu_list, _ = gpus.list_gpus(Reader())
        return next((gpu.name for gpu in gpu_list or () if gpu.name), "")

    def checks(self, catalog: Catalog) -> list[dict[str, Any]]:
        with self._launching() as launcher:
            watch = Timer(CHECKS_S, launcher.close)
            watch.start()
            try:
                return [result.to_json() for result in check_entries(catalog, catalog.current(), launcher, {})]
            finally:
                watch.cancel()

    def verify(self, catalog: Catalog, entry_id: str, settings: Mapping[str, str]) -> dict[str, Any]:
        """Verify an entry and return the report, which is saved like those of `kb verify`."""
        entry = catalog.get(entry_id)
        with self._launching() as launcher:
            session = prepare(catalog, [entry], settings, self._python, launcher, StatusLine(), notice)
            result = session.run(RunOptions(timeout_s=VERIFY_S))
        return result.reports[0].to_json()

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
