"""GET /v1/entries, and one entry as JSON, Markdown or HTML."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Path, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from kb.content.area import Area
from kb.content.entry import Entry, Status
from kb.content.filters import Filter

from ..pages.entry_page import render_entry
from ..pages.page import language
from ..requests import paging
from ..requests.accept import preferred
from ..requests.paging import Cursor
from ..requests.problems import documented
from ..requests.representation import CACHING, represent
from ..schemas.content import ID, EntryDocument, EntryList
from ..state.content import Content, ServedContent

JSON, MARKDOWN, HTML = "application/json", "text/markdown", "text/html"
VARY = {"Vary": "Accept, Accept-Language"}
LISTING = "entries"
TEXT = {"schema": {"type": "string"}}

router = APIRouter(prefix="/v1/entries", tags=["entries"])

IfNoneMatch = Annotated[str | None, Header(description="The ETag of your copy: 304 without a body if it is current.")]


@router.get(
    "",
    operation_id="listEntries",
    summary="List the entries",
    response_model=EntryList,
    responses={**CACHING, **documented(422, 503)},
)
async def list_entries(
    content: ServedContent,
    tag: Annotated[
        list[str] | None, Query(description="Only entries with this tag; repeat it to require several.")
    ] = None,
    framework: Annotated[str, Query(description="Only entries about this package or framework.")] = "",
    status: Annotated[Status | None, Query(description="Only entries of this status; default: not withdrawn.")] = None,
    area: Annotated[
        list[Area] | None, Query(description="Only entries of this area; repeat it to match any of several.")
    ] = None,
    limit: Annotated[int, Query(ge=1, le=500, description="At most this many entries.")] = 100,
    cursor: Cursor = None,
    if_none_match: IfNoneMatch = None,
) -> Response:
    """Entries by id: all that are not withdrawn, or those that pass all filters.

    A filter that no entry can pass is an error, which names the nearest value.
    """
    after = paging.position(LISTING, cursor) or ""
    only = Filter.of(tag, [framework] if framework else None, [status] if status else None, area)
    summaries = [summary for summary in only.listed(content.listing.summaries) if summary["id"] > after]
    summaries, following = paging.page(LISTING, summaries, limit, lambda summary: summary["id"])
    body = EntryList.model_validate({"entries": summaries, "next": following}).model_dump_json().encode()
    return represent(body, JSON, if_none_match or "")


@router.get(
    "/{id}",
    operation_id="getEntry",
    summary="Read an entry",
    response_model=EntryDocument,
    responses={
        200: {**CACHING[200], "content": {MARKDOWN: {**TEXT, "example": "# …"}, HTML: TEXT}},
        304: CACHING[304],
        **documented(404, 406, 422, 503),
    },
)
async def get_entry(
    request: Request,
    content: ServedContent,
    entry_id: Annotated[str, Path(alias="id", description="The id of an entry.", examples=[ID])],
    accept: Annotated[str, Header(include_in_schema=False)] = "*/*",
    if_none_match: IfNoneMatch = None,
) -> Response:
    """The entry as JSON; with `Accept: text/markdown` its file, with `text/html` its page."""
    entry = content.catalog.get(entry_id)
    kind = preferred(accept, (JSON, MARKDOWN, HTML))
    if kind is None:
        raise HTTPException(406, f"an entry is {JSON}, {MARKDOWN} or {HTML}", VARY)
    return represent(_representation(request, content, entry, kind), kind, if_none_match or "", VARY)


def _representation(request: Request, content: Content, entry: Entry, kind: str) -> bytes:
    if kind == MARKDOWN:
        return content.texts[entry.id].encode()
    if kind == HTML:
        return bytes(render_entry(request, content, entry, language(request)).body)
    libraries = [verdict.to_json() for verdict in content.libraries.get(entry.id, ())]
    return bytes(JSONResponse({**entry.to_json(), **content.on_record(entry), "libraries": libraries}).body)
