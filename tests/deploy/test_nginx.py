"""deploy/nginx.conf in front of two real replicas: they are one service, whichever of them answers or dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event

import httpx
import httpx2
import pytest
from mcp import ClientSession
from mcp.client.streamable_http import streamable_http_client

from tests.support.console import GENEROUS_S, ContentRoot, wait_for
from tests.support.mcp_client import document
from tests.support.nginx import Proxy, nginx
from tests.support.replicas import Place, Replica, started

pytestmark = pytest.mark.slow

PATHS = (
    "/v1/search?q=ALLGATHER+timeout+save&limit=3",
    "/v1/search?q=保存+超时",
    "/v1/entries",
    "/v1/entries/checkpoint-save-allgather-timeout",
    "/v1/context?q=NCCL+timeout&max_chars=2000",
    "/openapi.json",
)
LOG = b"step 1\n[rank1]: RuntimeError: the thing broke: code 7\n"
READERS = 4
PROBLEM = "application/problem+json"


@dataclass(frozen=True)
class Service:
    """Two replicas over one database behind nginx."""

    content: ContentRoot
    replicas: tuple[Replica, Replica]
    proxy: Proxy
    key: str
    admin: str

    @contextmanager
    def through(self, key: str | None = None) -> Iterator[httpx.Client]:
        with self.proxy.client(self.key if key is None else key) as client:
            yield client


@pytest.fixture(scope="module")
def service(built_in_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    path = tmp_path_factory.mktemp("service")
    content = ContentRoot(path / "content")
    content.entry("only-ours", title="A thing that only our team has")
    shutil.copytree(built_in_index, path / "cache")  # these replicas add an index of their own to it
    settings = {"KB_ROOTS": str(content.path), "KB_RATE": "", "KB_ANONYMOUS": "loopback"}
    place = Place(path, path / "cache", settings)
    with ExitStack() as stack:
        first, second = (stack.enter_context(started(place)) for _ in range(2))
        proxy = stack.enter_context(nginx(tmp_path_factory.mktemp("nginx"), (first.port, second.port)))
        yield Service(content, (first, second), proxy, place.key("read"), place.key("admin"))


@pytest.mark.parametrize("path", PATHS)
def test_both_replicas_give_the_same_answer_and_so_does_the_proxy(service: Service, path: str) -> None:
    key = {"authorization": f"Bearer {service.key}"}
    urls = [*(replica.url for replica in service.replicas), service.proxy.url]
    answers = [httpx.get(url + path, headers=key, timeout=60, trust_env=False) for url in urls[:2]]
    with service.through() as client:
        answers.append(client.get(path))
    assert [answer.status_code for answer in answers] == [200, 200, 200]
    # Links lead to where the reader asked: only an answer that has some differs, and with it its tag.
    assert len({answer.text.replace(url, "") for url, answer in zip(urls, answers, strict=True)}) == 1
    assert len({answer.headers.get("etag") for answer in answers}) == len({answer.content for answer in answers})


def test_what_comes_through_the_proxy_is_never_anonymous(service: Service) -> None:
    for replica in service.replicas:
        assert replica.get("/v1/entries")[0] == 200, "on its own, it lets loopback read"
    claims = {"x-forwarded-for": "127.0.0.1", "forwarded": "for=127.0.0.1", "x-real-ip": "127.0.0.1"}
    with service.through(key="") as client:
        for headers in ({}, claims, {"host": "localhost"}):
            answer = client.get("/v1/entries", headers=headers)
            assert (answer.status_code, answer.headers["www-authenticate"][:6]) == (401, "Bearer")
        assert client.get("/readyz").status_code == 200


def test_a_large_log_passes_and_a_larger_one_is_a_problem_document(service: Service) -> None:
    line = b"[rank0]: step 100 loss 0.25 tokens 4096\n"
    with service.through() as client:
        answer = client.post("/v1/diagnose", content=line * (20 << 15) + LOG)
        assert (answer.status_code, answer.json()["findings"][0]["id"]) == (200, "only-ours")
        assert answer.json()["read"]["bytes"] > 20 << 20
        assert client.post("/v1/diagnose", content=bytes(33 << 20)).status_code == 413
        elsewhere = client.post("/v1/feedback", content=bytes(2 << 20))
        assert (elsewhere.status_code, elsewhere.headers["content-type"]) == (413, PROBLEM)


def test_no_header_comes_twice(service: Service) -> None:
    with service.through() as client:
        for path in ("/v1/entries", "/healthz", "/v1/nothing"):
            names = [name for name, _ in client.get(path).headers.multi_items() if name != "vary"]
            assert sorted(set(names)) == sorted(names)
            assert "strict-transport-security" in names


def test_a_request_id_is_kept_and_nonsense_is_replaced(service: Service) -> None:
    with service.through() as client:
        assert client.get("/healthz", headers={"x-request-id": "trace-0123"}).headers["x-request-id"] == "trace-0123"
        made = client.get("/healthz", headers={"x-request-id": "a b\tc" * 20}).headers["x-request-id"]
        assert made.isalnum()


def test_metrics_are_asked_of_a_replica_and_not_through_the_proxy(service: Service) -> None:
    with service.through(service.admin) as client:
        assert client.get("/metrics").status_code == 404


def test_mcp_works_through_it_whichever_replica_answers(service: Service) -> None:
    async def ask() -> list[str]:
        headers = {"authorization": f"Bearer {service.key}"}
        async with (
            httpx2.AsyncClient(
                verify=service.proxy.trust, headers=headers, timeout=GENEROUS_S, trust_env=False
            ) as http,
            streamable_http_client(f"{service.proxy.url}/mcp", http_client=http) as (reading, writing, *_),
            ClientSession(reading, writing) as session,
        ):
            await session.initialize()
            result = []
            for _ in range(6):
                answer = await session.call_tool("search_incidents", {"query": "only our team"})
                result.append(document(answer)["hits"][0]["id"])
            return result

    assert asyncio.run(ask()) == ["only-ours"] * 6


def test_new_content_reaches_both_replicas(service: Service) -> None:
    service.content.entry("quite-new", title="A thing that came this morning")
    key = {"authorization": f"Bearer {service.key}"}
    with service.through(service.admin) as client:
        assert client.get("/v1/entries/quite-new").status_code == 404
        assert client.post("/v1/admin/reindex").status_code == 202
    for replica in service.replicas:
        wait_for(partial(_has, replica, "/v1/entries/quite-new", key), "the new entry")


def _has(replica: Replica, path: str, headers: dict[str, str]) -> bool:
    return replica.get(path, **headers)[0] == 200


def test_a_replica_is_killed_under_load_and_nobody_notices(service: Service) -> None:
    """An answer that it had begun is torn, at most one for each reader. The last test here: no replica is left."""
    with ThreadPoolExecutor(READERS) as readers:
        stop, statuses, torn = Event(), list[int](), list[httpx.RemoteProtocolError]()

        def read() -> None:
            with service.through() as client:
                while not stop.is_set():
                    try:
                        statuses.append(client.get("/v1/search?q=only+our+team").status_code)
                    except httpx.RemoteProtocolError as error:
                        torn.append(error)

        reading = [readers.submit(read) for _ in range(READERS)]
        wait_for(lambda: len(statuses) > 50, "reads before")
        killed, left = service.replicas
        os.kill(killed.process.pid, signal.SIGKILL)
        killed.process.wait(60)
        before = len(statuses)
        wait_for(lambda: len(statuses) > before + 200, "reads afterwards")
        stop.set()
        for item in reading:
            item.result()
        assert set(statuses) == {200}
        assert len(torn) <= READERS
        os.kill(left.process.pid, signal.SIGKILL)
        left.process.wait(60)
        with service.through() as client:
            answer = client.get("/v1/entries")
        assert (answer.status_code, answer.headers["content-type"]) == (503, PROBLEM)
        assert answer.headers["retry-after"] == "1"
