"""Which entries of several content roots are used: an id is unique unless a later entry says `replaces: <id>`."""

from __future__ import annotations

from pathlib import Path

from kb.errors import ContentError


def refusal(path: Path, line: int, entry_id: str, replaces: str | None, earlier: Path | None) -> ContentError | None:
    """Why an entry is left out, or None. `earlier` is the file that already has its id."""
    if earlier and replaces != entry_id:
        return ContentError(path, line, "duplicate-id", f"{earlier} has this id; say `replaces: {entry_id}`")
    if replaces and not (earlier and replaces == entry_id):
        return ContentError(path, line, "replaces-nothing", f"no earlier root has {replaces!r}")
    return None
