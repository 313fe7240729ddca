"""GET /v1/search: the entries that answer a question or a pasted log line."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import AfterValidator

from kb.filter import Filter
from kb.query import LONGEST_TEXT
from kb.search import MOST_HITS

from .content import Loaded
from .problems import documented
from .schemas import SearchResult

router = APIRouter(prefix="/v1", tags=["search"])


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("the query is empty")
    return text


Question = Annotated[
    str,
    Query(
        max_length=LONGEST_TEXT,
        description="Words or an error, English or Chinese; no operators.",
        examples=["ALLGATHER timeout save"],
    ),
    AfterValidator(_not_blank),
]
Limit = Annotated[int, Query(ge=1, le=MOST_HITS, description="At most this many hits.")]
Tags = Annotated[list[str] | None, Query(description="Only entries with this tag; repeated: with all of them.")]
Frameworks = Annotated[
    list[str] | None, Query(description="Only entries about this package or framework; repeated: about any of them.")
]
Statuses = Annotated[
    list[str] | None,
    Query(description="Only entries of this status: confirmed, reported, disputed; repeated: of any of them."),
]
Why = Annotated[bool, Query(description="Say of each hit what its score is made of.")]


@router.get(
    "/search",
    operation_id="search",
    summary="Find the entry for a failure",
    response_model=SearchResult,
    responses=documented(422, 503),
)
async def search(
    content: Loaded,
    q: Question,
    limit: Limit = 5,
    tag: Tags = None,
    framework: Frameworks = None,
    status: Statuses = None,
    why: Why = False,
) -> SearchResult:
    """Paste an error or describe it. Every hit says which words matched; no hit is an empty list, not an error.

    A filter takes hits away and changes no score; one that no entry can pass is an error that names the nearest.
    """
    answer = await content.search(q, limit, Filter.of(tag, framework, status), explain=why)
    return SearchResult(query=q[:1000], hits=answer.hits, did_you_mean=answer.did_you_mean or None)
