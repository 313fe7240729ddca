"""Which entries a reader wants to see at all: by tag, by framework, by status."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any, Self

from kb.errors import UsageError

WITHDRAWN = "withdrawn"
STATUSES = frozenset({"confirmed", "reported", "disputed"})  # a withdrawn entry answers nothing
Facets = Mapping[str, Any]  # of a stored document: `tags`, `frameworks` and `status`


@dataclass(frozen=True, slots=True)
class Filter:
    """What an entry must have: all of the tags, one of the frameworks, one of the statuses. Empty lets all pass.

    A framework is a package of which an entry names a version, or a tag.
    """

    tags: frozenset[str] = frozenset()
    frameworks: frozenset[str] = frozenset()
    statuses: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        tags: Iterable[str] | None = None,
        frameworks: Iterable[str] | None = None,
        statuses: Iterable[str] | None = None,
    ) -> Self:
        """A filter of what somebody typed: upper case, and `_` for `-`, are the same."""
        return cls(*(frozenset(map(_normal, values or ())) for values in (tags, frameworks, statuses)))

    def __bool__(self) -> bool:
        return bool(self.tags or self.frameworks or self.statuses)

    def admitted(self, documents: Mapping[int, Facets]) -> Set[int]:
        """The numbers of the documents that pass. Raises `UsageError` for a value that no document can have."""
        self._demand_known("entry that answers", documents.values(), STATUSES)
        return {number for number, facets in documents.items() if self._admits(facets)}

    def listed(self, documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """What a list of all these documents shows, in their order: withdrawn ones only under their status.

        Raises `UsageError` for a value that no document can have, withdrawn ones included.
        """
        documents = list(documents)
        if self:
            self._demand_known("entry", documents, STATUSES | {WITHDRAWN})
        shown = self if self.statuses else replace(self, statuses=STATUSES)
        return [document for document in documents if shown._admits(document)]

    def _demand_known(self, whose: str, documents: Collection[Facets], statuses: Set[str]) -> None:
        _demand(whose, "tag", self.tags, frozenset[str]().union(*map(_tags, documents)))
        _demand(whose, "framework", self.frameworks, frozenset[str]().union(*map(_frameworks, documents)))
        _demand(whose, "status", self.statuses, statuses)

    def _admits(self, facets: Facets) -> bool:
        return (
            (not self.tags or self.tags <= _tags(facets))
            and (not self.frameworks or not self.frameworks.isdisjoint(_frameworks(facets)))
            and (not self.statuses or facets["status"] in self.statuses)
        )


def _normal(value: str) -> str:
    return value.strip().lower().replace("_", "-")


def _tags(facets: Facets) -> frozenset[str]:
    return frozenset(map(_normal, facets["tags"]))


def _frameworks(facets: Facets) -> frozenset[str]:
    return frozenset(map(_normal, (*facets["frameworks"], *facets["tags"])))


def _demand(whose: str, kind: str, values: Set[str], known: Set[str]) -> None:
    for value in sorted(values - known):
        raise UsageError(f"no {whose} has the {kind} {value!r}", _hint(kind, value, known))


def _hint(kind: str, value: str, known: Set[str]) -> str:
    from kb.content.catalog import nearest  # only a mistake pays for the parsers of entries

    if kind == "status":
        withdrawn = "`kb list --status withdrawn` shows withdrawn entries" if value == WITHDRAWN else ""
        return withdrawn or f"one of {', '.join(sorted(known))}"
    close = nearest(value, sorted(known))
    return f"nearest: {', '.join(close)}" if close else "`kb list --json` shows the tags and frameworks of every entry"
