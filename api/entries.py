"""GET /v1/entries, one entry as JSON or as its Markdown file, and the reports of its verifications."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kb.entry import Status
from kb.store.reports import compare_wording, history

from .accept import preferred
from .content import Kept, Loaded
from .problems import documented
from .schemas import ID, EntryDocument, EntryList, ReportList

JSON, MARKDOWN = "application/json", "text/markdown"
VARY = {"Vary": "Accept"}

router = APIRouter(prefix="/v1/entries", tags=["entries"])

EntryId = Annotated[str, Path(alias="id", description="The id of an entry.", examples=[ID])]


@router.get(
    "",
    operation_id="listEntries",
    summary="List the entries",
    response_model=EntryList,
    responses=documented(422, 503),
)
async def list_entries(
    content: Loaded,
    tag: Annotated[
        list[str] | None, Query(description="Only entries with this tag; repeated: with all of them.")
    ] = None,
    framework: Annotated[str, Query(description="Only entries about this package or framework.")] = "",
    status: Annotated[Status | None, Query(description="Only entries of this status; default: not withdrawn.")] = None,
) -> dict[str, object]:
    """Every entry that is not withdrawn, by id, or those that fit all filters."""
    found = [
        one
        for one in content.summaries
        if set(tag or ()) <= set(one["tags"])
        and (not framework or framework.lower() in (*one["tags"], *one["frameworks"]))
        and (one["status"] == status if status else one["status"] != Status.WITHDRAWN)
    ]
    return {"entries": found}


@router.get(
    "/{id}",
    operation_id="getEntry",
    summary="Read an entry",
    response_model=EntryDocument,
    responses={
        200: {"content": {MARKDOWN: {"schema": {"type": "string"}, "example": "# …"}}},
        **documented(404, 406, 422, 503),
    },
)
async def get_entry(
    content: Loaded, entry_id: EntryId, accept: Annotated[str, Header(include_in_schema=False)] = "*/*"
) -> Response:
    """The entry as JSON, or under `Accept: text/markdown` the file as it is written."""
    entry = content.catalog.get(entry_id)
    kind = preferred(accept, (JSON, MARKDOWN))
    if kind is None:
        raise HTTPException(406, f"an entry is {JSON} or {MARKDOWN}", VARY)
    if kind == MARKDOWN:
        return Response(content.texts[entry.id], media_type=MARKDOWN, headers=VARY)
    return JSONResponse({**entry.to_json(), "hardware": content.hardware[entry.id] or None}, headers=VARY)


@router.get(
    "/{id}/reports",
    operation_id="listReports",
    summary="Read what verifications of an entry proved on this machine",
    response_model=ReportList,
    responses=documented(404, 422, 503),
)
def list_reports(
    content: Loaded,
    database: Kept,
    entry_id: EntryId,
    limit: Annotated[int, Query(ge=1, le=1000, description="At most this many reports.")] = 20,
) -> Response:
    """Newest first. Reports of an entry that is gone are still here; an entry never verified has none."""
    documents = history(database, entry_id, limit)
    if not documents:
        content.catalog.get(entry_id)
    return JSONResponse({"id": entry_id, "reports": compare_wording(documents, content.digests)})
