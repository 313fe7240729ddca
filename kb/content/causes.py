"""The graph of causes: which incident leads to which, and which one hides another.

Either entry may declare an edge, as `causes` or as `caused_by`; if both do, it is still one edge. Ids without an entry
are left out; the linter reports them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # loading pydantic takes longer than updating an index
    from kb.content.entry import Entry

Edge = tuple[str, str]


class Links(NamedTuple):
    """The ids that an entry links to."""

    id: str
    causes: Sequence[str]
    caused_by: Sequence[str]
    masked_by: Sequence[str]


@dataclass(frozen=True, slots=True)
class Graph:
    """The edges, sorted: `causes` holds (cause, consequence), `masks` holds (visible entry, entry that it hides)."""

    titles: dict[str, str]
    causes: tuple[Edge, ...]
    masks: tuple[Edge, ...]

    def causes_of(self, entry_id: str) -> tuple[str, ...]:
        return tuple(cause for cause, consequence in self.causes if consequence == entry_id)

    def consequences_of(self, entry_id: str) -> tuple[str, ...]:
        return tuple(consequence for cause, consequence in self.causes if cause == entry_id)

    def masked_by(self, entry_id: str) -> tuple[str, ...]:
        """The entries that are visible in place of this one."""
        return tuple(visible for visible, hidden in self.masks if hidden == entry_id)

    def hides(self, entry_id: str) -> tuple[str, ...]:
        return tuple(hidden for visible, hidden in self.masks if visible == entry_id)

    def around(self, entry_id: str) -> dict[str, Any]:
        """The direct neighbours of an entry, as `kb graph --json` gives them."""
        return {
            "id": entry_id,
            "title": self.titles[entry_id],
            "causes": self._with_titles(self.consequences_of(entry_id)),
            "caused_by": self._with_titles(self.causes_of(entry_id)),
            "masked_by": self._with_titles(self.masked_by(entry_id)),
            "masks": self._with_titles(self.hides(entry_id)),
        }

    def _with_titles(self, ids: Iterable[str]) -> list[dict[str, str]]:
        return [{"id": id_, "title": self.titles[id_]} for id_ in ids]


def graph(entries: Iterable[Entry]) -> Graph:
    """The graph over these entries."""
    entries = tuple(entries)
    causes, masks = edges(
        Links(entry.id, entry.meta.causes, entry.meta.caused_by, entry.meta.masked_by) for entry in entries
    )
    return Graph({entry.id: entry.meta.title for entry in entries}, causes, masks)


def edges(links: Iterable[Links]) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """(causes, masks) among entries, as in `Graph`."""
    links = tuple(links)
    ids = frozenset(link.id for link in links)
    causes = {(link.id, other) for link in links for other in link.causes}
    causes |= {(other, link.id) for link in links for other in link.caused_by}
    masks = {(other, link.id) for link in links for other in link.masked_by}
    return _known(causes, ids), _known(masks, ids)


def _known(edges: set[Edge], ids: frozenset[str]) -> tuple[Edge, ...]:
    return tuple(sorted(edge for edge in edges if edge[0] in ids and edge[1] in ids))
