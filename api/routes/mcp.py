"""POST /mcp: the Model Context Protocol over HTTP, for who may read.

The SDK costs half a second to import, so the first request starts the server, and who asks for none never pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pkgutil import resolve_name

from fastapi import APIRouter, FastAPI, HTTPException, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kb.diagnose.diagnosis import Diagnosis
from kb.search.results import Answer
from kb.store.reports import Standing

from ..mcp.tools import Tools
from ..state.content import Content, loaded
from ..state.unanswered import count

SERVER = f"{__package__}.mcp:over_http"

router = APIRouter(include_in_schema=False)


class McpService:
    """The server behind /mcp, in a task of its own from the first request on until the application ends."""

    def __init__(self, app: FastAPI) -> None:
        self._request = Request({"type": "http", "app": app})  # what the parts of the service take, for any question
        self._task: asyncio.Task[None] | None = None
        self._started: asyncio.Future[ASGIApp] | None = None

    async def started(self) -> ASGIApp:
        """What answers, once it is there. Raises what kept it from starting."""
        if self._started is None:
            self._started = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._run(self._started))
        return await asyncio.shield(self._started)

    async def end(self) -> None:
        if self._task:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self, started: asyncio.Future[ASGIApp]) -> None:
        try:
            over_http = await asyncio.to_thread(resolve_name, SERVER)
            async with over_http(Tools(self._content, self._standings, ear=self)) as handle:
                started.set_result(handle)
                await asyncio.Event().wait()
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _content(self) -> Content:
        return loaded(self._request)

    def _standings(self) -> Sequence[Standing]:
        found: Sequence[Standing] = self._request.app.state.snapshot.standings
        return found

    def searched(self, text: str, found: Answer) -> None:
        count(self._request, text, found)

    def diagnosed(self, found: Diagnosis) -> None:
        self._request.app.state.unanswered.note_diagnosis(found)


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[None]:
    """Part of the lifespan of an application: the server may start, and ends with it."""
    app.state.mcp = service = McpService(app)
    try:
        yield
    finally:
        await service.end()


class _Handed(Response):
    """The answer that another ASGI application gives to a request whose body has arrived."""

    def __init__(self, handle: ASGIApp, body: bytes) -> None:
        super().__init__()
        self._handle = handle
        self._arrived: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def again() -> Message:
            return self._arrived.pop() if self._arrived else await receive()

        await self._handle(scope, again, send)


@router.post("/mcp")
async def mcp(request: Request) -> Response:
    """One message. There are no sessions, so nothing but POST is answered."""
    try:
        body = await request.body()
    except ClientDisconnect:
        raise HTTPException(400, "the client left before its body had arrived") from None
    service: McpService = request.app.state.mcp
    return _Handed(await service.started(), body)
