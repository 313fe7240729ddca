"""POST /mcp: the Model Context Protocol over HTTP, for who may read.

The SDK costs half a second to import, so the first request starts the server, and who asks for none never pays.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pkgutil import resolve_name

from fastapi import APIRouter, FastAPI, Request, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from .content import Content, loaded

SERVER = f"{__package__}.mcp:over_http"

router = APIRouter(include_in_schema=False)


class McpService:
    """The server behind /mcp, in a task of its own from the first request on until the application ends."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
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
            async with over_http(self._content) as answer:
                started.set_result(answer)
                await asyncio.Event().wait()
        except Exception as error:
            started.set_exception(error)

    async def _content(self) -> Content:
        return loaded(Request({"type": "http", "app": self._app}))


@asynccontextmanager
async def running(app: FastAPI) -> AsyncIterator[None]:
    """Part of the lifespan of an application: the server may start, and ends with it."""
    app.state.mcp = service = McpService(app)
    try:
        yield
    finally:
        await service.end()


class _Handed(Response):
    """An answer that another ASGI application gives."""

    def __init__(self, answer: ASGIApp) -> None:
        super().__init__()
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._answer(scope, receive, send)


@router.post("/mcp")
async def mcp(request: Request) -> Response:
    """One message. There are no sessions, so nothing but POST is answered."""
    service: McpService = request.app.state.mcp
    return _Handed(await service.started())
