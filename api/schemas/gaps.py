"""Gaps, described for OpenAPI."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from .times import UtcTime

DIGEST = "2b8e1f1d1c0b6f3a9d8c7e6f5a4b3c2d1e0f9a8b7c6d5e4f3a2b1c0d9e8f7a6b"
GAP: dict[str, Any] = {
    "digest": DIGEST,
    "kind": "search",
    "text": "ncclCommSplit hangs after a rank was replaced on <host-1>",
    "count": 7,
    "first": "2026-03-01T08:30:00Z",
    "last": "2026-03-04T17:02:11Z",
    "best": "rendezvous-timeout",
}


class GapDocument(BaseModel):
    """A question that was asked `count` times and that no entry answers."""

    model_config = ConfigDict(from_attributes=True)
    digest: str = Field(description="Identifies the gap.")
    kind: str = Field(description="`search` for a question, `diagnose` for the lines of a log that nothing explained.")
    text: str = Field(description="One line, cut, without names and secrets.")
    count: int
    first: UtcTime = Field(description="When it was asked first.")
    last: UtcTime = Field(description="When it was asked last.")
    best: str = Field(description="The nearest entry; empty when there is none.")


class GapPage(BaseModel):
    """Gaps, the most frequent first. `next` is the cursor of the following page, null on the last one."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"gaps": [GAP], "next": None}]})
    gaps: tuple[GapDocument, ...]
    next: str | None
