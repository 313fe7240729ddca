"""Clients that misbehave at a real server, while others ask it something: slow, vanishing, greedy and malformed ones."""

from __future__ import annotations

import http.client
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from tests.support.console import wait_for
from tests.support.kb_serve import Serving, serving

pytestmark = pytest.mark.slow

SLOW = 10_000
OURS = 200  # file descriptors of a test for everything else
ASKED = b"GET /v1/search?q=timeout HTTP/1.1\r\nHost: localhost\r\n"
HEAD_S = 10.0  # after which a head that is not whole is given up


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path) -> Iterator[Serving]:
    home = tmp_path_factory.mktemp("service")
    with serving(HOME=str(home), XDG_CACHE_HOME=str(built_in_index), XDG_DATA_HOME=str(home), KB_ROOTS="") as started:
        yield started


@pytest.fixture
def many() -> Iterator[int]:
    """How many connections this process may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield SLOW if hard == resource.RLIM_INFINITY else min(SLOW, hard - OURS)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def connected(server: Serving, count: int, text: bytes) -> Iterator[list[socket.socket]]:
    """So many clients that say this and no more."""
    with ExitStack() as held:
        clients = []
        for _ in range(count):
            client = held.enter_context(socket.create_connection((server.host, server.port), timeout=60))
            client.sendall(text)
            clients.append(client)
        yield clients


def answers(server: Serving) -> None:
    """It answers a question; fails when it does not."""
    assert server.get("/v1/search?q=ALLGATHER+timeout+save")[1]["hits"]


def open_files(server: Serving) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"GET /v1/search?q=",
        b"POST /v1/diagnose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nfirst line\n",
    ],
    ids=["nothing", "half a head", "half a body"],
)
def test_ten_thousand_slow_clients_keep_nobody_from_an_answer(server: Serving, many: int, text: bytes) -> None:
    """Where this machine allows fewer connections to one process, as many as it allows."""
    with connected(server, many, text):
        for _ in range(20):
            answers(server)
    wait_for(lambda: open_files(server) < 200, "the connections to be closed")
    answers(server)


def test_who_does_not_finish_the_head_of_a_request_is_cut_off(server: Serving) -> None:
    with connected(server, 50, ASKED) as clients:
        started = time.monotonic()
        for client in clients:
            assert client.recv(100) == b""
        assert time.monotonic() - started > HEAD_S / 2  # it was given time


def test_a_connection_that_is_used_is_not_cut_off(server: Serving) -> None:
    connection = http.client.HTTPConnection(server.host, server.port, timeout=60)
    with closing(connection):
        connection.connect()
        held = connection.sock
        for _ in range(6):
            connection.request("GET", "/v1/search?q=timeout")
            assert len(connection.getresponse().read()) > 100
            time.sleep(HEAD_S / 4)
        assert connection.sock is held


def test_clients_that_leave_in_the_middle_of_a_body_leave_nothing_behind(server: Serving) -> None:
    before = open_files(server)
    head = b"POST /v1/diagnose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"
    for _ in range(100):
        with connected(server, 1, head + b"x\n" * 10_000):
            pass
    answers(server)
    wait_for(lambda: open_files(server) <= before + 5, "their connections to be closed")
    status, _, body = server.ask("POST", "/v1/diagnose", b"the thing broke")  # all places to read logs are free
    assert (status, body[:12]) == (200, b'{"findings":')


def test_a_body_of_10_gb_is_refused_before_any_of_it_is_sent(server: Serving) -> None:
    head = b"POST /v1/diagnose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10737418240\r\n\r\n"
    with connected(server, 1, head) as (client,):
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 413 ")
        while client.recv(1 << 16):
            pass  # and it ends the connection, or the rest would have to be read


def test_a_body_without_an_end_is_cut_at_the_limit(server: Serving) -> None:
    head = b"POST /v1/search HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
    text = head + b"Content-Type: application/json\r\n\r\n"
    with connected(server, 1, text) as (client,), pytest.raises(OSError, match=r"reset|Broken pipe"):
        for _ in range(100_000):
            client.sendall(b"1000\r\n" + b"[" * 4096 + b"\r\n")
    answers(server)


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Bomb: " + b"x" * (64 << 10) + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"".join(b"X-%d: y\r\n" % n for n in range(6000)) + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"Cookie: kb_key=;;;;=\r\n" * 3000 + b"\r\n",
        b"GET /?" + b"a=b&" * 20_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Bomb: " + b"x" * (256 << 10) + b"\r\n\r\n",
        b"x" * (1 << 20),
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil.example/ HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,  # somebody speaks TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=lambda head: repr(head[:24]),
)
def test_a_head_that_is_a_bomb_or_none_is_answered_or_ended_and_no_fault_of_ours(server: Serving, head: bytes) -> None:
    with connected(server, 1, b"") as (client,):
        try:
            client.sendall(head)
            text = client.recv(1 << 16)
        except OSError:
            text = b""  # it hung up while we spoke
    assert not text or text.split(b" ")[1] < b"500"
    answers(server)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/entries/..%2f..%2fetc%2fpasswd",
        "/v1/entries/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/entries/../../etc/passwd",
        "/v1/entries/....//....//etc/passwd",
        "/v1/entries/%252e%252e%252fetc%252fpasswd",
        "/static/../app.py",
        "/static/..%2fapp.py",
        "/static/..%5capp.py",
        "/static/%2e%2e/%2e%2e/settings.py",
        "/static//etc/passwd",
        "/static/%2fetc%2fpasswd",
        "/entries/..%2f..%2fetc%2fpasswd",
        "//etc/passwd",
    ],
)
def test_no_path_leads_out_of_what_is_served(server: Serving, path: str) -> None:
    status, _, body = server.ask("GET", path)
    assert status == 404
    assert b"root:" not in body
    assert b"import" not in body


def test_a_client_that_asks_for_websocket_is_answered_and_logs_no_warning(server: Serving) -> None:
    status, _ = server.get("/v1/entries", Connection="Upgrade", Upgrade="websocket")
    assert status == 200
    assert "pgrade" not in server.output


def test_a_request_in_flight_when_the_service_ends_is_answered_and_no_fault(
    tmp_path: Path, built_in_index: Path
) -> None:
    where = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": str(tmp_path)}
    head = b"POST /v1/diagnose HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\nfirst line\n"
    with serving(KB_ROOTS="", **where) as own, connected(own, 1, head) as (client,):
        answers(own)
        assert own.stop(signal.SIGTERM) == -signal.SIGTERM
        assert client.recv(1 << 16).split()[1] == b"503"
        assert "Traceback" not in own.output


def test_a_question_is_answered_after_all_of_this_and_nothing_failed_here(server: Serving) -> None:
    answers(server)
    assert "Traceback" not in server.output
    assert not [line for line in server.logged if line["level"] == "ERROR"]
