"""GET and POST /v1/search: the entries that answer a question or a pasted log line."""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from kb.hit import Answer

from .answers import LastAnswers, Sent, answer
from .content import Loaded
from .problems import documented
from .questions import LONGEST_ECHO, SearchQuestion, SearchText
from .representation import CACHING, represent
from .schemas import SearchResult
from .unanswered import count

JSON = "application/json"

router = APIRouter(prefix="/v1", tags=["search"])


@router.get(
    "/search",
    operation_id="search",
    summary="Find the entry for a failure",
    response_model=SearchResult,
    responses={**CACHING, **documented(422, 503)},
)
async def search(
    request: Request, content: Loaded, answers: LastAnswers, question: Annotated[SearchQuestion, Query()]
) -> Response:
    """Paste an error or describe it. Every hit says which words matched; no hit is an empty list, not an error.

    A filter takes hits away and changes no score; one that no entry can pass is an error that names the nearest. With
    `gpu` or `torch` those of the good hits come first whose fix was verified on such hardware, and say so. A question
    that is not `answered` is counted among the gaps, without names and secrets.
    """
    body = await _sent(request, content, answers, question)
    return represent(body, JSON, request.headers.get("if-none-match", ""))


@router.post(
    "/search",
    operation_id="searchText",
    summary="Find the entry for a long text",
    response_model=SearchResult,
    responses=documented(422, 503),
)
async def search_text(request: Request, content: Loaded, answers: LastAnswers, question: SearchText) -> Response:
    """The answer of `search`, to a question in a body: for a text that is too long for an address."""
    return Response(await _sent(request, content, answers, question), media_type=JSON)


async def _sent(request: Request, content: Loaded, answers: LastAnswers, question: SearchQuestion) -> bytes:
    snapshot = request.app.state.snapshot
    key = f"search {snapshot.reports if question.here else 0} {question.model_dump_json()}"
    sent = answers.get(content, key)
    if sent is None:
        sent = _body(await answer(content, snapshot.standings, question))
        answers.put(content, key, sent)
    count(request, "" if question.only else question.q, sent)
    return sent.body


def _body(found: Answer) -> Sent:
    document = {
        "query": found.query[:LONGEST_ECHO],
        "hits": [hit.to_json() for hit in found.hits],
        "did_you_mean": found.did_you_mean or None,
        "answered": found.answered,
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return Sent(body, found.answered, found.best)
