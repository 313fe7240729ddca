"""A client of the MCP server like that of a chatbot: the SDK's own, over stdio or HTTP, for synchronous tests."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import anyio
import httpx2
from anyio.from_thread import BlockingPortal, start_blocking_portal
from mcp import Client
from mcp.client.session import ElicitationFnT
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CallToolResult, TextContent

from tests.support.console import GENEROUS_S
from tests.support.warm_command import warm_command


class Model:
    """A language model that calls tools through its client."""

    def __init__(self, client: Client, portal: BlockingPortal) -> None:
        self.client = client
        self._portal = portal

    def call(self, tool: str, **arguments: Any) -> CallToolResult:
        return self._portal.call(partial(self.client.call_tool, tool, arguments))

    def answer(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool, which must succeed, and return its document."""
        return document(self.call(tool, **arguments))

    def refused(self, tool: str, **arguments: Any) -> str:
        """Call a tool, which must fail, and return its message."""
        result = self.call(tool, **arguments)
        assert result.is_error
        assert isinstance(result.content[0], TextContent)
        return result.content[0].text

    def at_once(self, calls: list[tuple[str, dict[str, Any]]]) -> list[CallToolResult]:
        """Run calls concurrently and return their answers."""
        return self._portal.call(self._at_once, calls)

    async def _at_once(self, calls: list[tuple[str, dict[str, Any]]]) -> list[CallToolResult]:
        answers: dict[int, CallToolResult] = {}

        async def ask(number: int, tool: str, arguments: dict[str, Any]) -> None:
            answers[number] = await self.client.call_tool(tool, arguments)

        async with anyio.create_task_group() as group:
            for number, (tool, arguments) in enumerate(calls):
                group.start_soon(ask, number, tool, arguments)
        return [answers[number] for number in range(len(calls))]

    def do(self, method: str, *args: Any) -> Any:
        """Call another method of the client, for instance `list_tools`."""
        return self._portal.call(partial(getattr(self.client, method), *args))


def document(result: CallToolResult) -> dict[str, Any]:
    """The JSON document of a successful call, which must contain it only once."""
    [content] = result.content
    assert isinstance(content, TextContent)
    assert not result.is_error, content.text
    assert result.structured_content is None
    answer: dict[str, Any] = json.loads(content.text)
    return answer


@contextmanager
def connected(client: AbstractAsyncContextManager[Client]) -> Iterator[Model]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(client) as opened:
        yield Model(opened, portal)


@contextmanager
def over_http(url: str, key: str = "", mode: str = "auto", consent: ElicitationFnT | None = None) -> Iterator[Model]:
    """A client of a service's /mcp. `mode` "legacy" acts like clients before 2026; `consent` answers for the person."""

    @asynccontextmanager
    async def opened() -> AsyncIterator[Client]:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with (
            httpx2.AsyncClient(headers=headers, timeout=GENEROUS_S, trust_env=False) as http,
            Client(
                streamable_http_client(f"{url}/mcp", http_client=http), mode=mode, elicitation_callback=consent
            ) as client,
        ):
            yield client

    with connected(opened()) as model:
        yield model


@contextmanager
def over_stdio(
    *args: str | Path,
    env: Mapping[str, str] | None = None,
    mode: str = "auto",
    consent: ElicitationFnT | None = None,
    stderr: TextIO | None = None,
) -> Iterator[Model]:
    """A client of a new `kb mcp`."""
    command, *arguments = warm_command("mcp", *args)
    server = StdioServerParameters(command=command, args=arguments, env=dict(env or os.environ))
    transport = stdio_client(server, stderr or sys.__stderr__ or sys.stderr)
    client = Client(transport, mode=mode, elicitation_callback=consent, read_timeout_seconds=GENEROUS_S)
    with connected(client) as model:
        yield model
