"""`kb new`: write the two files of a new incident."""

from __future__ import annotations

import datetime
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from kb.content.roots import BUILT_IN, configured_roots
from kb.errors import UsageError

from ..terminal.output import JsonFlag, emit, shown

if TYPE_CHECKING:
    from kb.authoring.log_excerpt import Draft


def new(
    entry_id: Annotated[
        str, typer.Argument(metavar="ID", help="Name of the problem: lower-case words joined by hyphens.")
    ],
    home: Annotated[
        Path | None, typer.Option("--root", metavar="DIR", help="The content root to write to; created if missing.")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE|QUEUE-ID", help="A log, or an id from the queue of unexplained logs."),
    ] = None,
    as_json: JsonFlag = False,
) -> int:
    """Write an entry and a probe to fill in; `kb lint` lists what is left to do.

    With --from, the entry starts with the redacted log and candidate signatures.
    """
    from kb.authoring.log_excerpt import NO_DRAFT
    from kb.authoring.scaffold import scaffold

    home = _home(home)
    draft = _draft(source) if source is not None else NO_DRAFT
    entry, probe = scaffold(home, entry_id, datetime.date.today(), draft)
    if as_json:
        emit("new", entry=str(entry), probe=str(probe))
    else:
        print(f"{shown(entry)}\n{shown(probe)}")
        if draft is not NO_DRAFT:
            print("review the log before you share it: redaction recognises patterns, not what is confidential to you")
        print("next: fill in what says TODO until the first command is clean, then verify it:")
        print(f"  kb lint {quote(str(shown(entry)))}\n  kb verify {entry_id} --root {quote(str(shown(home)))}")
    return 0


def _draft(source: str) -> Draft:
    """A draft from the queue if `source` is one of its ids, otherwise from a file. Raises `UsageError`."""
    from kb.authoring import unexplained_queue
    from kb.authoring.log_excerpt import draft

    if unexplained_queue.ID.fullmatch(source):
        item = unexplained_queue.load(source)
        return draft(item.excerpt.splitlines(), item.seen)
    try:
        with Path(source).expanduser().open(encoding="utf-8", errors="replace") as file:
            return draft(file)
    except OSError as error:
        raise UsageError(f"{source}: {error.strerror}", "name a log, or an id from the queue") from error


def _home(given: Path | None) -> Path:
    """The given root, or the only private root. Raises `UsageError` when the choice is ambiguous."""
    if given is not None:
        return given.expanduser().absolute()
    roots = [configured_root for configured_root in configured_roots() if configured_root.name != BUILT_IN]
    if len(roots) == 1:
        return roots[0].entries.parent
    if (Path.cwd() / "entries").is_dir():
        return Path.cwd()
    raise UsageError(
        "the content root to write to is ambiguous", "name it with --root DIR, or set KB_ROOTS to your team's root"
    )
