"""POST /mcp: the Model Context Protocol over HTTP, with the scope `read`.

The server starts with the first request, because importing the SDK takes half a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pkgutil import resolve_name

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kb.diagnose.diagnosis import Diagnosis
from kb.search.results import Answer
from kb.store.reports import VerdictCount

from ..mcp.tools import Tools
from ..state.application import application
from ..state.content import Content, served_content
from ..state.gap_queue import count

SERVER = "kb.api.mcp.server:over_http"

router = APIRouter(include_in_schema=False)


class McpService:
    """The server behind /mcp, which runs in a task from the first request until the application ends."""

    def __init__(self, app: FastAPI) -> None:
        self._request = Request({"type": "http", "app": app})  # for functions that need a request
        self._task: asyncio.Task[None] | None = None
        self._handler: asyncio.Future[ASGIApp] | None = None

    async def close(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def handler(self) -> ASGIApp:
        """The handler of the running server. Raises the error that kept the server from starting."""
        if self._handler is None:
            self._handler = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._handler))
        return await asyncio.shield(self._handler)

    async def _run(self, handler: asyncio.Future[ASGIApp]) -> None:
        try:
            over_http = await asyncio.to_thread(resolve_name, SERVER)
            async with over_http(Tools(self._content, self._verdict_counts, recorder=self)) as handle:
                handler.set_result(handle)
                await asyncio.Event().wait()
        except Exception as error:
            if handler.done():
                raise
            handler.set_exception(error)

    async def _content(self) -> Content:
        return served_content(self._request)

    def _verdict_counts(self) -> Sequence[VerdictCount]:
        return application(self._request).snapshot.verdict_counts

    def record_search(self, text: str, answer: Answer) -> None:
        count(self._request, text, answer)

    def record_diagnosis(self, diagnosis: Diagnosis) -> None:
        application(self._request).gaps.add_diagnosis(diagnosis)


class _Delegated(Response):
    """The response of another ASGI application, for a request whose body has arrived."""

    def __init__(self, handle: ASGIApp, body: bytes) -> None:
        super().__init__()
        self._handle = handle
        self._messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def replay() -> Message:
            return self._messages.pop() if self._messages else await receive()

        await self._handle(scope, replay, send)


@router.post("/mcp")
async def mcp(request: Request) -> Response:
    """Handle one message. There are no sessions, so only POST is supported."""
    body = await request.body()
    return _Delegated(await application(request).mcp.handler(), body)
