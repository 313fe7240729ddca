"""`kb new`: the two files of a new incident."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Annotated

import typer

from kb import root
from kb.errors import UsageError

from .output import JsonFlag, emit, shown


def new(
    entry_id: Annotated[str, typer.Argument(metavar="ID", help="Says what is wrong: lower-case words with hyphens.")],
    home: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="The content root to write into; made when missing.")
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Write an entry and a probe to fill in; `kb lint` then names what is left to do."""
    from kb.scaffold import scaffold

    home = _home(home)
    entry, probe = scaffold(home, entry_id, datetime.date.today())
    if as_json:
        emit("new", entry=str(entry), probe=str(probe))
    else:
        print(f"{shown(entry)}\n{shown(probe)}")
        print(f"next: kb lint {shown(entry)}, until it is clean; then kb verify {entry_id} --root {shown(home)}")
    return 0


def _home(given: Path | None) -> Path:
    """The root that was named, or the only one of the team. Raises `UsageError` when that is not clear."""
    if given is not None:
        return given.expanduser().absolute()
    roots = [one for one in root.configured() if one.name != root.BUILT_IN]
    if len(roots) == 1:
        return roots[0].entries.parent
    if (Path.cwd() / "entries").is_dir():
        return Path.cwd()
    raise UsageError("into which content root?", "name it with --root DIR, or set KB_ROOTS to your team's")
