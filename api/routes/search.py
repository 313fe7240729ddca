"""GET and POST /v1/search: the entries that answer a question or a pasted log line."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response
from fastapi.routing import APIRoute

from kb.search.results import Answer

from ..requests.problems import documented
from ..requests.questions import LONGEST_ECHO, SearchQuestion, SearchText
from ..requests.representation import CACHING, represent
from ..schemas.content import SearchResult
from ..state.application import application
from ..state.content import Content, ServedContent, served_content
from ..state.gap_queue import count
from ..state.response_cache import CachedResponse

JSON = "application/json"
MOST_QUERIES, LONGEST_QUERY = 1024, 2048  # cached query strings, and bytes of each


class CachedQueryRoute(APIRoute):
    """A route that caches parsed query strings: for a repeated question, parsing would be two thirds of the work."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        parse_and_handle, questions = super().get_route_handler(), dict[bytes, SearchQuestion]()

        async def handle(request: Request) -> Response:
            query: bytes = request.scope["query_string"]
            if query in questions:
                return await _respond(request, served_content(request), questions[query])
            response = await parse_and_handle(request)
            if len(query) <= LONGEST_QUERY:
                questions[query] = request.state.question
            if len(questions) > MOST_QUERIES:
                del questions[next(iter(questions))]
            return response

        return handle


router = APIRouter(tags=["search"])
cached = APIRouter(prefix="/v1", route_class=CachedQueryRoute)


@cached.get(
    "/search",
    operation_id="search",
    summary="Find the entry for a failure",
    response_model=SearchResult,
    responses={**CACHING, **documented(422, 503)},
)
async def search(request: Request, content: ServedContent, question: Annotated[SearchQuestion, Query()]) -> Response:
    """Paste an error or describe it. Every hit says which words matched; no hit is an empty list, not an error.

    A filter removes hits and does not change scores; a filter that no entry can pass is an error, which names the
    nearest value. With `gpu` or `torch`, good hits whose fix was verified on such hardware come first, and say so. A
    question that is not `answered` is counted among the gaps, without names and secrets.
    """
    request.state.question = question
    return await _respond(request, content, question)


@router.post(
    "/v1/search",
    operation_id="searchText",
    summary="Find the entry for a long text",
    response_model=SearchResult,
    responses=documented(422, 503),
)
async def search_text(request: Request, content: ServedContent, question: SearchText) -> Response:
    """Like `search`, with the question in the body, for a text that is too long for a URL."""
    return Response(await _body(request, content, question), media_type=JSON)


router.include_router(cached)


async def _respond(request: Request, content: Content, question: SearchQuestion) -> Response:
    body = await _body(request, content, question)
    return represent(body, JSON, request.headers.get("if-none-match", ""))


async def _body(request: Request, content: Content, question: SearchQuestion) -> bytes:
    state = application(request)
    key = f"search {state.snapshot.reports if question.here else 0} {question.model_dump_json()}"
    response = state.cache.get(content, key)
    if response is None:
        response = _response(content, await content.answer(question, state.snapshot.verdict_counts))
        state.cache.put(content, key, response)
    count(request, "" if question.only else question.q, response)
    return response.body


def _response(content: Content, answer: Answer) -> CachedResponse:
    document = {
        "query": answer.query[:LONGEST_ECHO],
        "hits": [hit.to_json() for hit in answer.hits],
        "did_you_mean": answer.did_you_mean or None,
        "kind": answer.kind,
        "probability": answer.probability,
        "answered": answer.answered,
        **content.gap(answer),
    }
    body = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    return CachedResponse(body, answer.answered, answer.best)
