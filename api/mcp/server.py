"""The MCP server, over stdio and over HTTP. Only this module, `consent`, `messages` and `stdio` import the SDK.

Over HTTP it is stateless, so any replica can answer any request. Verification is available only on stdio, if allowed,
and needs the consent of the person at the client each time.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ResourceError, ResourceNotFoundError, ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.server.transport_security import TransportSecuritySettings
from mcp.shared.exceptions import MCPError
from mcp_types import INTERNAL_ERROR, INVALID_PARAMS, Resource, ToolAnnotations
from pydantic import ValidationError
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kb import __version__
from kb.content.roots import Root
from kb.errors import KbError, UnknownEntry

from ..state.content import Content
from .answers import encode
from .consent import verify_fix
from .inline_schema import inline
from .instructions import INSTRUCTIONS, triage
from .machine import Machine
from .messages import refusal
from .stdio import stdio
from .tools import Tools

MARKDOWN = "text/markdown"
MOST_NAME = 100  # characters of an unknown name that are repeated in an error
READS = ToolAnnotations(read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False)
RUNS = ToolAnnotations(read_only_hint=False, destructive_hint=False, idempotent_hint=False, open_world_hint=False)
# The middleware has already checked the key and the host name: see `access`.
CHECKED_BEFORE = TransportSecuritySettings(enable_dns_rebinding_protection=False)


class Server(MCPServer[Tools]):
    """The tools, the entries as resources, and the prompt; with `allows_verify`, also the tool that runs probes."""

    def __init__(self, tools: Tools, *, allows_verify: bool = False) -> None:
        @asynccontextmanager
        async def lifespan(_: MCPServer[Tools]) -> AsyncIterator[Tools]:
            yield tools

        offered = _tools(tools, allows_verify)
        with _unchanged_logging():
            super().__init__(
                "kb",
                title="Distributed-training incidents",
                instructions=INSTRUCTIONS,
                version=__version__,
                tools=offered,
                lifespan=lifespan,
                subscriptions=False,  # the content does not change during a connection
            )
        self._tools = tools
        self._arguments = {tool.name: list(tool.parameters["properties"]) for tool in offered}
        self.resource("kb://entries/{id}", name="entry", title="An incident", mime_type=MARKDOWN)(self.entry)
        self.prompt(title="Triage of a failed job", description="From a log or a symptom to a verified fix.")(triage)

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        known = self._arguments.get(name, arguments)
        if unknown := [argument for argument in arguments if argument not in known]:
            raise ToolError(f"{name} has no argument {unknown[0][:MOST_NAME]!r}; hint: one of {', '.join(known)}")
        try:
            return await super().call_tool(name, arguments, context)
        except ToolError as error:
            if not isinstance(error.__cause__, ValidationError):
                raise
            raise ToolError(_invalid_arguments(error.__cause__)) from None

    async def run_stdio_async(self) -> None:
        async with stdio() as (incoming, outgoing):
            server = self._lowlevel_server
            await server.run(incoming, outgoing, server.create_initialization_options())

    async def get_prompt(self, name: str, arguments: dict[str, Any] | None = None, context: Any = None) -> Any:
        try:
            return await super().get_prompt(name, arguments, context)
        except ValueError as error:  # a mistake of the caller, which the SDK would report as an internal error
            raise MCPError(INVALID_PARAMS, self._prompt_error(error)) from None

    def _prompt_error(self, error: BaseException) -> str:
        """The message of the error that the prompt itself raised, which the SDK has wrapped."""
        cause = error
        while cause.__cause__:
            cause = cause.__cause__
        if isinstance(cause, ValidationError):
            return _invalid_arguments(cause)
        return self._tools.error_text(cause) if isinstance(cause, KbError) else str(cause)

    async def list_resources(self) -> list[Resource]:
        try:
            content = await self._tools.content()
        except KbError as error:
            raise MCPError(INTERNAL_ERROR, self._tools.error_text(error)) from None
        return [
            Resource(uri=f"kb://entries/{entry.id}", name=entry.id, title=entry.meta.title, mime_type=MARKDOWN)
            for entry in content.catalog.current()
        ]

    async def entry(self, id: str) -> str:  # noqa: A002  # the name in the template
        """The Markdown file of an incident."""
        try:
            content = await self._tools.content()
            return content.texts[content.catalog.get(id).id]
        except KbError as error:
            kind = ResourceNotFoundError if isinstance(error, UnknownEntry) else ResourceError
            raise kind(self._tools.error_text(error)) from None


def _tools(tools: Tools, allows_verify: bool) -> list[Tool]:
    reading = [
        _tool(tools, tools.search_incidents, "Search incidents", READS),
        _tool(tools, tools.get_incident, "Read an incident", READS),
        _tool(tools, tools.diagnose_log, "Diagnose a log", READS),
        _tool(tools, tools.check_environment, "Check an environment", READS),
    ]
    return [*reading, _tool(tools, verify_fix, "Verify a fix on this machine", RUNS)] if allows_verify else reading


def _tool(tools: Tools, function: Callable[..., Awaitable[Any]], title: str, annotations: ToolAnnotations) -> Tool:
    """A tool with readable errors and an argument schema for simple clients.

    It answers only with JSON text: every client passes that to its model, and structured content would repeat it.
    """

    @functools.wraps(function)
    async def call(*args: Any, **named: Any) -> str:
        try:
            return encode(await function(*args, **named))
        except KbError as error:
            raise ToolError(tools.error_text(error)) from None

    description = inspect.getdoc(function)
    tool = Tool.from_function(
        call, title=title, description=description, annotations=annotations, structured_output=False
    )
    tool.parameters = inline(tool.parameters)
    return tool


def _invalid_arguments(error: ValidationError) -> str:
    """The message for invalid arguments, without their values, which may be whole logs."""
    problems = (
        f"{'.'.join(map(str, problem['loc']))}: {problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors()
    )
    return f"{'; '.join(problems)}; hint: the list of tools and prompts describes the arguments"


@contextmanager
def _unchanged_logging() -> Iterator[None]:
    """Restore the root logger after the block, since the SDK sets a handler and a level on it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


@asynccontextmanager
async def over_http(tools: Tools) -> AsyncIterator[ASGIApp]:
    """The application behind /mcp. It has no machine and runs no probe."""
    assert tools.machine is None
    server = Server(tools)
    server.streamable_http_app(
        stateless_http=True,
        json_response=True,
        transport_security=CHECKED_BEFORE,
    )

    async def handle(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an invalid message with the same error as over stdio; the SDK would print its models."""
        body = await receive()  # the whole body: see the route
        error = refusal(body.get("body", b"").decode(errors="replace"))
        if error:
            await JSONResponse(error.model_dump(mode="json", exclude_none=False), 400)(scope, receive, send)
        else:
            messages = iter((body,))
            await server.session_manager.handle_request(scope, lambda: _next(messages, receive), send)

    async with server.session_manager.run():
        yield handle


async def _next(messages: Iterator[Message], receive: Receive) -> Message:
    """The next message that was read already, or else the next one to be received."""
    return next(messages, None) or await receive()


def over_stdio(roots: tuple[Root, ...], machine: Machine, *, allows_verify: bool) -> None:
    """Serve until standard input ends. Requests wait until the content is read; the handshake does not."""

    async def serve() -> None:
        with ThreadPoolExecutor(1, "kb-search") as searching:
            loading = searching.submit(Content.load, roots, searching)
            tools = Tools(lambda: asyncio.wrap_future(loading), machine=machine)
            try:
                await Server(tools, allows_verify=allows_verify).run_stdio_async()
            finally:
                (await asyncio.wrap_future(loading)).close()

    asyncio.run(serve())
