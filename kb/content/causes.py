"""The graph of causes: which incident leads to which, and which one hides another.

An edge may be written at either end (`causes` of the one, `caused_by` of the other) and is one edge. Ids that no
entry has are left out: the linter names them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kb.content.entry import Entry

Edge = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Graph:
    """`causes` holds (cause, consequence), `masks` (what is seen, what it hides); both sorted."""

    titles: dict[str, str]
    causes: tuple[Edge, ...]
    masks: tuple[Edge, ...]

    def causes_of(self, entry_id: str) -> tuple[str, ...]:
        return tuple(cause for cause, consequence in self.causes if consequence == entry_id)

    def consequences_of(self, entry_id: str) -> tuple[str, ...]:
        return tuple(consequence for cause, consequence in self.causes if cause == entry_id)

    def masked_by(self, entry_id: str) -> tuple[str, ...]:
        """What is seen in its place."""
        return tuple(seen for seen, hidden in self.masks if hidden == entry_id)

    def hides(self, entry_id: str) -> tuple[str, ...]:
        return tuple(hidden for seen, hidden in self.masks if seen == entry_id)

    def around(self, entry_id: str) -> dict[str, Any]:
        """The direct neighbours of an entry, as `kb graph --json` gives them."""
        return {
            "id": entry_id,
            "title": self.titles[entry_id],
            "causes": self._named(self.consequences_of(entry_id)),
            "caused_by": self._named(self.causes_of(entry_id)),
            "masked_by": self._named(self.masked_by(entry_id)),
            "masks": self._named(self.hides(entry_id)),
        }

    def _named(self, ids: Iterable[str]) -> list[dict[str, str]]:
        return [{"id": id_, "title": self.titles[id_]} for id_ in ids]


def graph(entries: Iterable[Entry]) -> Graph:
    """The graph over these entries."""
    entries = tuple(entries)
    titles = {entry.id: entry.meta.title for entry in entries}
    causes = {(entry.id, other) for entry in entries for other in entry.meta.causes}
    causes |= {(other, entry.id) for entry in entries for other in entry.meta.caused_by}
    masks = {(other, entry.id) for entry in entries for other in entry.meta.masked_by}
    return Graph(titles, _known(causes, titles), _known(masks, titles))


def _known(edges: set[Edge], titles: dict[str, str]) -> tuple[Edge, ...]:
    return tuple(sorted(edge for edge in edges if edge[0] in titles and edge[1] in titles))
