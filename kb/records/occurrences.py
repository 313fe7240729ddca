"""Occurrences: which releases of which packages have a text or name, as the records of wordings and names say."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kb.content.roots import Root
from kb.errors import UsageError


@dataclass(frozen=True, slots=True)
class Occurrences:
    """The searched releases of each package, and the releases that have each text, by package; oldest first."""

    searched: Mapping[str, Sequence[str]] = field(default_factory=dict)
    found: Mapping[str, Mapping[str, Sequence[str]]] = field(default_factory=dict)

    def to_json(self, schema: str, day: str) -> dict[str, Any]:
        return {"schema": schema, "day": day, "releases": self.searched, "found": self.found}


def occurrences(roots: Iterable[Root], file_name: str, written_by: str) -> Occurrences:
    """The record in the files of this name of all roots. Raises `UsageError` for an invalid file."""
    searched: dict[str, Sequence[str]] = {}
    found: dict[str, Mapping[str, Sequence[str]]] = {}
    for path in (root.verified / file_name for root in roots):
        if path.is_file():
            try:
                document = json.loads(path.read_text(encoding="utf-8"))
                searched.update(document["releases"])
                found.update(document["found"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise UsageError(f"{path} is not a valid record: {error}", f"`{written_by}` writes it") from None
    return Occurrences(searched, found)
