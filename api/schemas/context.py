"""A context, which is claims with their sources and grades, described for OpenAPI."""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field

from kb.content.claims import Claim
from kb.search.decision import Kind

from .content import QuestionDocument

TEXT = "Gradient clipping spreads it further: it multiplies all gradients by `max_norm / norm`, and the norm is NaN."
URL = "https://docs.pytorch.org/docs/stable/generated/torch.nn.utils.clip_grad_norm_.html"
GRADE = "seen in the probe"
CLAIM: dict[str, Any] = {
    "entry": "nan-loss",
    "section": "Root cause",
    "grade": GRADE,
    "status": "confirmed",
    "text": TEXT,
    "references": [URL],
    "url": "https://kb.example.org/entries/nan-loss",
}
CONTEXT = f"{TEXT} [nan-loss § Root cause, {GRADE}; read in source: {URL}]"


class ClaimDocument(BaseModel):
    """One statement of an entry, in Markdown."""

    entry: str = Field(description="The id of the entry.")
    section: str = Field(description="Its heading there; for a Chinese claim the heading of its part.")
    grade: str = Field(
        description="How it is known: `seen in the probe`, `read in source`, `read in thread`, `claimed` by somebody, "
        "`inferred`; `stated` by the entry without a grade."
    )
    status: str = Field(description="Of the whole entry: confirmed by its probe, reported or disputed.")
    text: str = Field(description="With its code and without its marks.")
    references: tuple[str, ...] = Field(description="Where it can be checked.")
    url: str = Field(description="The page of the entry.")

    @classmethod
    def of(cls, claim: Claim, url: str) -> Self:
        members = {name: getattr(claim, name) for name in cls.model_fields if name != "url"}
        return cls.model_validate({**members, "url": url})


class ContextDocument(BaseModel):
    """`context` is the block for the model, `claims` is the same piece by piece.

    `truncated`: not all claims fitted in. Unless `kind` is `answer`, no entry is about the question: then there are no
    claims, except those of `related` entries on request, and `ask` has what to ask the person: lines and observations
    that tell the nearest entries apart.
    """

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "query": "loss is nan",
                    "context": CONTEXT,
                    "kind": "answer",
                    "claims": [CLAIM],
                    "truncated": True,
                    "ask": [],
                }
            ]
        }
    )
    query: str
    context: str
    kind: Kind
    claims: tuple[ClaimDocument, ...]
    truncated: bool
    ask: tuple[QuestionDocument, ...]
