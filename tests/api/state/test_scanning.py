"""Who may hold a place in which a log is read, and for how long."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Iterator
from itertools import repeat
from pkgutil import resolve_name
from threading import Event
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from kb.diagnose.inputs.sources import Stream
from kb.errors import IndexUnavailable, UsageError
from tests.support.console import GENEROUS_S

pytest_plugins = ["tests.support.app_fixtures"]

FORM = {"Content-Type": "multipart/form-data; boundary=x"}
content: Any = resolve_name("kb.api.state.content")
upload: Any = resolve_name("kb.api.requests.upload")
scanning: Any = resolve_name("kb.api.state.scanning")


class Silent(httpx.AsyncByteStream):
    """A body that never begins."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(2 * GENEROUS_S)
        yield b""


async def beside_silent_clients(app: FastAPI, path: str, headers: dict[str, str], **body: Any) -> httpx.Response:
    transport = httpx.ASGITransport(app, client=("127.0.0.1", 50000))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        silent = [
            asyncio.ensure_future(client.post(path, content=Silent(), headers=headers))
            for _ in range(2 * content.MOST_UPLOADS)
        ]
        await asyncio.sleep(0.1)
        try:
            async with asyncio.timeout(GENEROUS_S):
                return await client.post(path, **body)
        finally:
            for item in silent:
                item.cancel()
            await asyncio.gather(*silent, return_exceptions=True)


def test_who_sends_nothing_takes_no_place_from_others(
    client: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "STALL_S", 4 * GENEROUS_S)
    portal = client._transport.portal  # type: ignore[attr-defined]
    page = {"files": {"log": ("train.log", b"the thing broke: code 42\n")}}
    for path, headers, body in (("/diagnose", FORM, page), ("/v1/diagnose", {}, {"content": b"epoch 1\n"})):
        answer = portal.call(
            lambda path=path, headers=headers, body=body: beside_silent_clients(app, path, headers, **body)
        )
        assert answer.status_code == 200


def test_a_log_that_unpacks_to_nothing_for_ever_is_given_up(
    client: httpx.Client, app: FastAPI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scanning, "MOST_S", 0.05)

    async def read() -> None:
        empty = repeat(gzip.compress(b"") * 1000)
        await asyncio.wait_for(app.state.loading.result().scanning.scan([Stream("empty", empty)]), GENEROUS_S)

    with pytest.raises(UsageError, match="too long"):
        client._transport.portal.call(read)  # type: ignore[attr-defined]


def test_a_service_that_ends_waits_for_no_log(client: httpx.Client, app: FastAPI) -> None:
    has_begun = Event()

    def endless() -> Iterator[bytes]:
        has_begun.set()
        while True:
            yield b"epoch 1\n"

    async def read() -> None:
        scanning = app.state.loading.result().scanning
        reading = asyncio.ensure_future(scanning.scan([Stream("endless", endless())]))
        await asyncio.to_thread(has_begun.wait, GENEROUS_S)
        scanning.close()
        await asyncio.wait_for(reading, GENEROUS_S)

    with pytest.raises(IndexUnavailable, match="shutting down"):
        client._transport.portal.call(read)  # type: ignore[attr-defined]
