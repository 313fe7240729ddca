"""The API in this process, with a small content root and a new store: fixtures for tests/api.

A test file uses `pytest_plugins = ["tests.support.app_fixtures"]`, since mypy takes a second conftest.py for the first.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI

from kb.content.roots import builtin_root, root_at
from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import ContentRoot, wait_until_ready
from tests.support.ready_store import ready_store


class Pieces(httpx.AsyncByteStream):
    """Makes a plain iterator of bytes asynchronous."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self.pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            yield piece


class InProcess(httpx.BaseTransport):
    """Passes the requests of a plain `httpx.Client` to an application in the event loop of a portal."""

    def __init__(self, app: FastAPI, portal: BlockingPortal) -> None:
        self.app = app
        self.portal = portal

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        return self.portal.call(self._answer, request)

    async def _answer(self, request: httpx.Request) -> httpx.Response:
        address = request.extensions.get("client", "127.0.0.1")
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=(address, 50000))
        if not isinstance(request.stream, httpx.AsyncByteStream):  # a body that is generated while it is sent
            request.stream = Pieces(request.stream)
        answer = await transport.handle_async_request(request)
        packed = b"".join([piece async for piece in answer.aiter_raw()])
        return httpx.Response(answer.status_code, headers=answer.headers, content=packed)


@pytest.fixture
def entries(content: ContentRoot) -> ContentRoot:
    """Three entries: one current, one withdrawn, one about something else. The triage is the built-in one."""
    shutil.copytree(builtin_root().entries / "triage", content.path / "entries" / "triage")
    content.entry("broken-thing")
    withdrawn = content.entry("old-thing", title="The thing that was never true")
    withdrawn.write_text(withdrawn.read_text().replace("status: confirmed", "status: withdrawn"))
    other = content.entry("slow-disk", title="The disk is slow", extra='applies_to: {torch: ">=2.0"}\n')
    text = other.read_text().replace("tags: [test]", "tags: [test, storage]").replace("area: data", "area: hardware")
    other.write_text(text)
    return content


@pytest.fixture
def written() -> Iterator[list[str]]:
    """Files that Python opens for writing during the test, without those that SQLite opens."""
    result: list[str] = []
    is_watching = True

    def hear(event: str, args: tuple[Any, ...]) -> None:  # stays: a hook cannot be removed
        if is_watching and event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR) and ".pyc" not in str(args[0]):
            result.append(str(args[0]))

    sys.addaudithook(hear)
    yield result
    is_watching = False


@pytest.fixture
def store_path(tmp_path: Path) -> Path:
    return tmp_path / "store" / "reports.db"


@pytest.fixture
def admin(store_path: Path) -> dict[str, str]:
    """The header with a key of scope admin."""
    with Database.open(ready_store(store_path)) as store:
        _, text = keys.new(store, "test", Scope.ADMIN, actor="tester")
    return {"Authorization": f"Bearer {text}"}


@pytest.fixture
def make_app(entries: ContentRoot, store_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FastAPI]:
    """Make an application over the entries and the store, with settings that the test may change.

    The process that scans logs starts with the first log, since few tests send one.
    """
    monkeypatch.setattr(resolve_name("kb.api.state.scanning").ScanPool, "start", lambda _: None)
    create_app: Callable[..., FastAPI] = resolve_name("kb.api.app:create_app")  # by name: no module may import a shell
    settings: Any = resolve_name("kb.api.settings:Settings")

    def make(**chosen: Any) -> FastAPI:
        return create_app(settings(**{"roots": (root_at(entries.path),), "database": store_path, **chosen}))

    return make


@pytest.fixture
def app(make_app: Callable[..., FastAPI]) -> FastAPI:
    return make_app()


@contextmanager
def serve(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of an application that has started but may still be reading its content."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(app.router.lifespan_context(app)),
        httpx.Client(transport=InProcess(app, portal), base_url="http://localhost") as client,
    ):
        yield client


@pytest.fixture(name="serve")
def served() -> Callable[[FastAPI], AbstractContextManager[httpx.Client]]:
    return serve


@pytest.fixture
def client(app: FastAPI) -> Iterator[httpx.Client]:
    """A client of an application that is ready."""
    with serve(app) as client:
        wait_until_ready(app)
        yield client
