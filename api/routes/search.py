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
from ..state.content import Content, Loaded, loaded
from ..state.response_cache import Answers, LastAnswers, Sent, answer
from ..state.unanswered import count

JSON = "application/json"

MOST_READ, LONGEST_READ = 1024, 2048  # questions, bytes of one


class Asked(APIRoute):
    """Reads a query string once: for one that comes again, that would be two thirds of the work of an answer."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        read, questions = super().get_route_handler(), dict[bytes, SearchQuestion]()

        async def handle(request: Request) -> Response:
            query: bytes = request.scope["query_string"]
            if query in questions:
                return await _answered(request, loaded(request), request.app.state.answers, questions[query])
            sent = await read(request)
            if len(query) <= LONGEST_READ:
                questions[query] = request.state.question
            if len(questions) > MOST_READ:
                del questions[next(iter(questions))]
            return sent

        return handle


router = APIRouter(tags=["search"])
asked = APIRouter(prefix="/v1", route_class=Asked)


@asked.get(
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
    request.state.question = question
    return await _answered(request, content, answers, question)


@router.post(
    "/v1/search",
    operation_id="searchText",
    summary="Find the entry for a long text",
    response_model=SearchResult,
    responses=documented(422, 503),
)
async def search_text(request: Request, content: Loaded, answers: LastAnswers, question: SearchText) -> Response:
    """The answer of `search`, to a question in a body: for a text that is too long for an address."""
    return Response(await _sent(request, content, answers, question), media_type=JSON)


router.include_router(asked)


async def _answered(request: Request, content: Content, answers: Answers, question: SearchQuestion) -> Response:
    body = await _sent(request, content, answers, question)
    return represent(body, JSON, request.headers.get("if-none-match", ""))


async def _sent(request: Request, content: Content, answers: Answers, question: SearchQuestion) -> bytes:
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
