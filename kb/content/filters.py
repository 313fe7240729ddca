"""Filters entries by tag, framework, status and area."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Self

from kb.content.area import Area
from kb.errors import UsageError

WITHDRAWN = "withdrawn"
STATUSES = frozenset({"confirmed", "reported", "disputed"})  # a withdrawn entry answers nothing
AREAS = frozenset(area.value for area in Area)
Facets = Mapping[str, Any]  # the fields of a stored document that filters use


@dataclass(frozen=True, slots=True)
class Filter:
    """What an entry must have: all of the tags, and one of the frameworks, one of the statuses and one of the areas.

    An empty set admits every entry. A framework is a tag, or a package for which the entry names a version.
    """

    tags: frozenset[str] = frozenset()
    frameworks: frozenset[str] = frozenset()
    statuses: frozenset[str] = frozenset()
    areas: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        tags: Iterable[str] | None = None,
        frameworks: Iterable[str] | None = None,
        statuses: Iterable[str] | None = None,
        areas: Iterable[str] | None = None,
    ) -> Self:
        """A filter from values as users type them: case does not matter, and `_` equals `-`."""
        return cls(*(frozenset(map(_normal, values or ())) for values in (tags, frameworks, statuses, areas)))

    def __bool__(self) -> bool:
        return bool(self.tags or self.frameworks or self.statuses or self.areas)

    def admitted(self, documents: Mapping[int, Facets]) -> Set[int]:
        """The numbers of the documents that pass. Raises `UsageError` for a value that no document can have."""
        self._require_known("entry that answers", documents.values(), STATUSES)
        return {number for number, facets in documents.items() if self._admits(facets)}

    def listed(self, documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """The documents that a list shows, in their order: withdrawn entries only if their status is asked for.

        Raises `UsageError` for a value that no document has, withdrawn entries included.
        """
        documents = list(documents)
        if self:
            self._require_known("entry", documents, STATUSES | {WITHDRAWN})
        visible = self if self.statuses else replace(self, statuses=STATUSES)
        return [document for document in documents if visible._admits(document)]

    def _require_known(self, subject: str, documents: Collection[Facets], statuses: Set[str]) -> None:
        _require(subject, "tag", self.tags, frozenset[str]().union(*map(_tags, documents)))
        _require(subject, "framework", self.frameworks, frozenset[str]().union(*map(_frameworks, documents)))
        _require(subject, "status", self.statuses, statuses)
        _require(subject, "area", self.areas, AREAS)

    def _admits(self, facets: Facets) -> bool:
        return (
            (not self.tags or self.tags <= _tags(facets))
            and (not self.frameworks or not self.frameworks.isdisjoint(_frameworks(facets)))
            and (not self.statuses or facets["status"] in self.statuses)
            and (not self.areas or facets["area"] in self.areas)
        )


def _normal(value: str) -> str:
    return value.strip().lower().replace("_", "-")


def _tags(facets: Facets) -> frozenset[str]:
    return frozenset(map(_normal, facets["tags"]))


def _frameworks(facets: Facets) -> frozenset[str]:
    return frozenset(map(_normal, (*facets["frameworks"], *facets["tags"])))


def _require(subject: str, kind: str, values: Set[str], known: Set[str]) -> None:
    for value in sorted(values - known):
        raise UsageError(f"no {subject} has the {kind} {value!r}", _hint(kind, value, known))


def _hint(kind: str, value: str, known: Set[str]) -> str:
    from kb.content.catalog import nearest  # loads the parsers of entries, which only a mistake needs

    if kind == "status" and value == WITHDRAWN:
        return "`kb list --status withdrawn` shows withdrawn entries"
    if kind in ("status", "area"):
        return f"one of {', '.join(sorted(known))}"
    close = nearest(value, sorted(known))
    return f"nearest: {', '.join(close)}" if close else "`kb list --json` shows the tags and frameworks of every entry"
