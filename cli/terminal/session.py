"""A verification session at a terminal, with a status line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from .progress import StatusLine

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
) -> Iterator[tuple[Session, StatusLine]]:
    """A session with these entries planned for this machine, and its status line; closes the launcher at the end."""
    from kb.harness.launcher import Launcher
    from kb.verify.session import prepare

    with StatusLine() as progress, Launcher(interpreter, keep_logs) as launcher:
        yield (
            prepare(catalog, entries, settings, interpreter, launcher, progress, progress.notify, force=force),
            progress,
        )
