"""A verification session at a terminal: with a status line, and ended in order by SIGTERM or Ctrl-C."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .output import notice

if TYPE_CHECKING:
    from kb.content.catalog import Catalog
    from kb.content.entry import Entry
    from kb.verify.session import Session


@contextmanager
def session(
    catalog: Catalog,
    entries: list[Entry],
    settings: dict[str, str],
    interpreter: Path,
    keep_logs: Path | None = None,
    *,
    force: bool = False,
) -> Iterator[Session]:
    """These entries, planned for this machine, while their launcher is open."""
    from kb.harness.launcher import Launcher
    from kb.verify.session import prepare

    from .progress import StatusLine

    with _terminable(), StatusLine() as progress, Launcher(interpreter, keep_logs) as launcher:
        yield prepare(catalog, entries, settings, interpreter, launcher, progress, notice, force=force)


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
