"""Validated questions of clients. The query of a GET and the body of a POST have the same members."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from kb.content.area import Area
from kb.content.entry import Status
from kb.content.filters import Filter
from kb.search.query import LONGEST_TEXT
from kb.search.ranking import MOST_HITS
from kb.sharing.hardware_boost import Hardware

MOST_VALUES = 20  # per filter
LEAST_CHARS, MOST_CHARS = 500, 20_000
LONGEST_ECHO = 1000  # characters of a question that are repeated in its response

Value = Annotated[str, Field(max_length=100)]
Values = Annotated[list[Value] | None, Field(max_length=MOST_VALUES)]


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the query is empty")
    return text


def _choices(values: type[StrEnum]) -> Callable[[dict[str, Any]], None]:
    """Describe a closed list in a schema. An unknown value is refused later, with the nearest one as a hint."""

    def describe(schema: dict[str, Any]) -> None:
        for option in schema["anyOf"]:
            if option["type"] == "array":
                option["items"] = {"type": "string", "enum": [value.value for value in values]}

    return describe


Text = Annotated[str, Field(max_length=LONGEST_TEXT, json_schema_extra={"pattern": r"\S"}), AfterValidator(_not_blank)]


class SearchQuestion(BaseModel):
    """A question about a failure, and limits of its answer."""

    model_config = ConfigDict(
        json_schema_extra={"examples": [{"q": "ALLGATHER timeout save", "limit": 3, "gpu": "H100"}]}
    )
    q: Text = Field(
        description="Words or an error, English or Chinese; no operators.", examples=["ALLGATHER timeout save"]
    )
    limit: int = Field(5, ge=1, le=MOST_HITS, description="At most this many hits.")
    tag: Values = Field(None, description="Only entries with this tag; repeat it to require several.")
    framework: Values = Field(
        None, description="Only entries about this package or framework; repeat it to match any of several."
    )
    status: Values = Field(
        None,
        description="Only entries with this status; repeat it to match any of several.",
        json_schema_extra=_choices(Status),
    )
    area: Values = Field(
        None,
        description="Only entries of this area; repeat it to match any of several.",
        json_schema_extra=_choices(Area),
    )
    why: bool = Field(False, description="Explain the score of each hit.")
    gpu: Value = Field(
        "", description="Your GPU: good answers with a fix verified on that model come first.", examples=["H100"]
    )
    torch: Value = Field(
        "",
        description="Your torch: among those answers, fixes verified on the same release come first.",
        examples=["2.7.1"],
    )

    @property
    def only(self) -> Filter:
        return Filter.of(self.tag, self.framework, self.status, self.area)

    @property
    def here(self) -> Hardware:
        return Hardware(self.gpu, self.torch)


class SearchText(SearchQuestion):
    """A question in a body: a number must be a JSON number, not text."""

    model_config = ConfigDict(strict=True)


class ContextQuestion(BaseModel):
    """A question for a language model, and how much context it gets."""

    q: Text = Field(description="The question, or an error; English or Chinese.", examples=["ALLGATHER timeout save"])
    max_chars: int = Field(
        4000, ge=LEAST_CHARS, le=MOST_CHARS, description="At most this many characters, including citations."
    )
    lang: Literal["en", "zh"] = Field("en", description="The language of the claims.")
    related: bool = Field(False, description="Include claims of nearby entries when no entry answers.")
