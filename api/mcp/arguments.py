"""The arguments of the MCP tools: their bounds, and their descriptions for a model."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from kb.content.area import Area
from kb.diagnose.ranking import MOST_FINDINGS
from kb.search.ranking import MOST_HITS

from ..requests.questions import Text, Value, Values

Query = Annotated[
    Text,
    Field(
        description="An error line as it was printed, or the symptom in a few words; English or Chinese; no operators."
    ),
]
Limit = Annotated[int, Field(ge=1, le=MOST_HITS, description="At most this many hits.")]
Tags = Annotated[Values, Field(description="Only incidents with all of these tags, such as fsdp.")]
Frameworks = Annotated[
    Values, Field(description="Only incidents about one of these packages, such as torch, deepspeed.")
]
Statuses = Annotated[
    Values, Field(description="Only incidents of one of these statuses: confirmed, reported, disputed.")
]
Areas = Annotated[
    Values, Field(description=f"Only incidents of one of these areas of a training job: {', '.join(Area)}.")
]
EntryId = Annotated[str, Field(max_length=200, description="The id of an incident, as the other tools give it.")]
Language = Annotated[Literal["en", "zh"] | None, Field(description="Their language; default: en.")]
Sections = Annotated[
    Values,
    Field(description="Only these sections, such as Symptom, Known cases; default: the most useful ones, kept short."),
]
FindingLimit = Annotated[
    int | None, Field(ge=1, le=MOST_FINDINGS, description="At most this many findings; default: up to 3, kept short.")
]
IncidentLimit = Annotated[
    int | None, Field(ge=1, le=1000, description="At most this many incidents; default: the most severe, kept short.")
]
Log = Annotated[str, Field(description="The log as it was printed, all ranks together if there are more; up to 2 MB.")]
Name = Annotated[str, Field(max_length=100)]
Packages = Annotated[
    dict[Name, Name | None] | None,
    Field(
        max_length=2000,
        description="Versions by package, as `pip list` prints them; also python, cuda and nccl. Null is a version "
        "that cannot be read.",
    ),
]
ReaderGpu = Annotated[
    Value,
    Field(description="The model of their GPUs, such as H100: good hits with a fix verified on that model come first."),
]
ReaderTorch = Annotated[Value, Field(description="Their version of torch: among those, the same release comes first.")]
GpuName = Annotated[str, Field(max_length=200, description="The model of the GPUs, such as H100; default: not known.")]
