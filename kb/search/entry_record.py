"""What an update of the index must know about an indexed entry without reading its file."""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from kb.content.causes import Links

if TYPE_CHECKING:
    from kb.content.entry import Entry

MENTION = re.compile(r"`([a-z0-9-]+)`")
WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class EntryRecord:
    """One entry file. `mentions` are ids that it may mention. `omitted` are those that were ids of other entries when
    it was indexed, so that they were left out.
    """

    id: str
    origin: str
    digest: str
    id_line: int
    replaces: str | None
    status: str
    causes: list[str]
    caused_by: list[str]
    masked_by: list[str]
    mentions: list[str]
    omitted: list[str]

    @classmethod
    def of(cls, entry: Entry) -> Self:
        """The record of an entry that is not indexed yet."""
        meta = entry.meta
        mentions = {mention for section in entry.sections.values() for mention in MENTION.findall(section.text)}
        return cls(
            id=entry.id,
            origin=entry.origin,
            digest=entry.digest,
            id_line=entry.id_line,
            replaces=meta.replaces,
            status=meta.status.value,
            causes=meta.causes,
            caused_by=meta.caused_by,
            masked_by=meta.masked_by,
            mentions=sorted(mentions - {entry.id}),
            omitted=[],
        )

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the text that was indexed."""
        return self.origin, self.id, self.digest

    @property
    def is_current(self) -> bool:
        """Whether the entry answers questions."""
        return self.status != WITHDRAWN

    @property
    def links(self) -> Links:
        return Links(self.id, self.causes, self.caused_by, self.masked_by)

    def among(self, ids: Set[str]) -> Self:
        """The record of the entry, indexed among entries with these ids."""
        return replace(self, omitted=self._omitted_among(ids))

    def is_valid_among(self, ids: Set[str]) -> bool:
        """Whether the entry would be indexed in the same way among entries with these ids."""
        return self.omitted == self._omitted_among(ids)

    def _omitted_among(self, ids: Set[str]) -> list[str]:
        return [mention for mention in self.mentions if mention in ids]
