"""`kb serve`: the real server, started, asked and ended as a person does."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from support import KB, ContentRoot, Kb, end, wait_for

from kb.query import LONGEST_TEXT


class Server:
    """A running `kb serve`; `lines` is what it has said on stderr."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.lines = [self._line()]
        while "serving on" not in self.lines[-1]:
            self.lines.append(self._line())
        url = urlsplit(self.lines[-1].removeprefix("kb: serving on ").split()[0])
        assert url.hostname
        assert url.port
        self.host, self.port = url.hostname, url.port

    def _line(self) -> str:
        assert self.process.stderr
        line = self.process.stderr.readline().decode()
        assert line, "it ended before it served"
        return line.strip()

    def get(self, path: str) -> tuple[int, Any]:
        """(status, JSON document)."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def stop(self, number: signal.Signals) -> tuple[int, str]:
        """(exit code, the rest of stderr) after a signal."""
        self.process.send_signal(number)
        assert self.process.stderr
        return self.process.wait(60), self.process.stderr.read().decode()


@contextmanager
def serving(*args: str | Path) -> Iterator[Server]:
    process = subprocess.Popen(
        [str(KB), "serve", "--port", "0", *map(str, args)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        server = Server(process)
        wait_for(lambda: server.get("/readyz")[0] == 200, "the server to be ready")
        yield server
    finally:
        end(process)
        if process.stderr:
            process.stderr.close()


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A content root that only `--root` names."""
    root = ContentRoot(tmp_path / "team: private")
    root.entry("only-ours", title="A thing that only our team has")
    return root.path


def test_it_serves_a_private_root_and_the_built_in_entries(private: Path) -> None:
    with serving("--root", private) as server:
        assert server.lines == [f"kb: serving on http://127.0.0.1:{server.port} (Ctrl-C ends it)"]
        status, found = server.get(f"/v1/search?q={quote('only our team')}")
        assert status == 200
        assert found["hits"][0]["id"] == "only-ours"
        assert found["hits"][0]["origin"] == str(private)
        _, found = server.get(f"/v1/search?q={quote('ALLGATHER timeout save')}&limit=1")
        assert found["hits"][0]["id"] == "checkpoint-save-allgather-timeout"
        assert server.get("/v1/entries/only-our")[1]["nearest"] == ["only-ours"]


def test_it_serves_the_reports_of_this_user(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    assert kb("verify", "breaks").code == 0
    with serving() as server:
        status, found = server.get("/v1/entries/breaks/reports")
    assert status == 200
    assert [one["verdict"] for one in found["reports"]] == ["verified"]


def test_the_longest_query_passes_in_chinese_and_a_longer_one_is_a_problem() -> None:
    with serving() as server:
        assert server.get(f"/v1/search?q={quote('断' * LONGEST_TEXT)}")[0] == 200
        status, problem = server.get(f"/v1/search?q={quote('断' * (LONGEST_TEXT + 1))}")
        assert (status, problem["errors"][0]["parameter"]) == (422, "q")


def test_an_answer_waits_for_no_acknowledgement() -> None:
    """Without TCP_NODELAY the head and the body of each answer lie 40 ms apart."""
    listen = resolve_name("kb.cli.serve:_listen")
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=60):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_without_a_traceback_although_a_client_is_half_way(number: signal.Signals, code: int) -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /v1/search?q=")
        assert server.get("/healthz")[0] == 200
        ended, said = server.stop(number)
        assert (ended, [line for line in said.splitlines() if not line.startswith("building the search index")]) == (
            code,
            [],
        )
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_beyond_loopback_it_says_who_can_read() -> None:
    with serving("--host", "0.0.0.0") as server:
        assert "no authentication" in server.lines[0]
        assert f"http://0.0.0.0:{server.port}" in server.lines[1]


def test_it_listens_on_loopback_alone_unless_told_otherwise() -> None:
    with serving() as server, pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.2", server.port), timeout=60)


def test_ipv6_is_served() -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with serving("--host", "::1") as server:
        assert server.lines == [f"kb: serving on http://[::1]:{server.port} (Ctrl-C ends it)"]


def test_a_port_in_use_is_a_usage_error(kb: Kb) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = kb("serve", "--port", str(taken.getsockname()[1]))
    assert ended.code == 2
    assert "in use" in ended.err
    assert "--port" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize("args", [("--host", "no.such.host.invalid"), ("--host", "192.0.2.1"), ("--port", "65536")])
def test_an_address_that_cannot_be_taken_is_a_usage_error(kb: Kb, args: tuple[str, str]) -> None:
    ended = kb("serve", *args)
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_a_root_that_is_none_is_a_usage_error(kb: Kb, tmp_path: Path) -> None:
    ended = kb("serve", "--root", tmp_path)
    assert ended.code == 2
    assert "not a content root" in ended.err


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_it_names_it(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kb.cli.main import run; sys.exit(run(['serve']))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"needs {missing}" in ended.stderr
    assert "pip install 'gpu-kb[server]'" in ended.stderr
