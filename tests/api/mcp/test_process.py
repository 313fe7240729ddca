"""`kb mcp` as a process: what is on its standard output, how it ends, and what it leaves behind."""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from tests.support.console import CHECKOUT, GENEROUS_S, KB, ContentRoot, Kb, end, is_running, wait_for
from tests.support.in_process import run_kb_here
from tests.support.warm_start import MCP, PIPE, Fork, start_warm

pytestmark = pytest.mark.slow

HELLO = {
    "protocolVersion": "2025-11-25",
    "capabilities": {"elicitation": {}},
    "clientInfo": {"name": "a test", "version": "1"},
}
WAITS = """
Path(os.environ["MARK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


class Raw:
    """A `kb mcp` that is spoken to line by line."""

    def __init__(self, process: subprocess.Popen[bytes] | Fork) -> None:
        self.process = process

    def say(self, line: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + b"\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """The next message; fails when it is none."""
        assert self.process.stdout
        return json.loads(self.process.stdout.readline())

    def ask(self, method: str, name: str = "", /, **params: Any) -> None:
        """A request; its id is its method, or the name it is given."""
        message = {"jsonrpc": "2.0", "id": name or method, "method": method, "params": params}
        self.say(json.dumps(message).encode())

    def tell(self, method: str, **params: Any) -> None:
        self.say(json.dumps({"jsonrpc": "2.0", "method": method, "params": params}).encode())

    def consent(self) -> None:
        """Say yes to the question that comes next."""
        question = self.hear()
        assert question["method"] == "elicitation/create"
        answer = {"action": "accept", "content": {"run": True}}
        self.say(json.dumps({"jsonrpc": "2.0", "id": question["id"], "result": answer}).encode())

    def cancel(self, name: str) -> None:
        self.tell("notifications/cancelled", requestId=name, reason="the person left")

    def pong(self) -> bool:
        """Whether a ping is answered, whatever else is heard before."""
        self.ask("ping")
        while (answer := self.hear())["id"] != "ping":
            pass
        return bool(answer["result"] == {})

    def greet(self) -> None:
        self.ask("initialize", **HELLO)
        assert self.hear()["result"]["serverInfo"]["name"] == "kb"
        self.tell("notifications/initialized")

    def rest(self) -> tuple[int, bytes, bytes]:
        """(exit code, the rest of stdout, stderr) once it has ended."""
        out, err = self.process.communicate(timeout=GENEROUS_S)
        return self.process.wait(GENEROUS_S), out, err


def warm(*args: str) -> Fork:
    return start_warm("mcp", *args, imports=MCP, stdin=PIPE, stdout=PIPE, stderr=PIPE)


def cold() -> subprocess.Popen[bytes]:
    """As a client starts it."""
    return subprocess.Popen([str(KB), "mcp"], stdin=PIPE, stdout=PIPE, stderr=PIPE)


@contextmanager
def started(process: subprocess.Popen[bytes] | Fork) -> Iterator[Raw]:
    try:
        yield Raw(process)
    finally:
        end(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream
            if not stream.closed:
                stream.close()


def test_nothing_but_the_protocol_is_on_standard_output_and_it_ends_with_its_input() -> None:
    with started(cold()) as server:
        server.greet()
        server.say(b"this is no JSON")
        assert server.hear()["error"]["code"] == -32700
        server.ask("tools/call", name="search_incidents", arguments={"query": "ALLGATHER timeout save"})
        server.ask("no/such/method")
        answers = {item["id"]: item for item in (server.hear(), server.hear()) if "id" in item}
        assert json.loads(answers["tools/call"]["result"]["content"][0]["text"])["hits"]
        assert answers["no/such/method"]["error"]["code"] == -32601
        assert server.rest()[:2] == (0, b"")


UNREADABLE = [
    (b"{", -32700, None),
    (b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"a": "\\ud800"}}', -32700, 7),
    (b'{"jsonrpc": "2.0", "id": "\\ud800", "method": "ping"}', -32700, None),
    (
        b'{"jsonrpc": "2.0", "id": 7, "method": "ping", "params": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}",
        -32700,
        None,
    ),
    (b"[]", -32600, None),
    (b'{"jsonrpc": "2.0", "id": 1.5, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "2.0", "id": null, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "2.0", "id": true, "method": "ping"}', -32600, None),
    (b'{"jsonrpc": "2.0", "id": 7}', -32600, 7),
    (b'{"id": "seven", "method": "ping"}', -32600, "seven"),
]


def test_a_line_that_is_no_message_gets_an_error_and_the_next_one_its_answer() -> None:
    with started(warm()) as server:
        for line, code, request_id in UNREADABLE:  # before the handshake, too
            server.say(line)
            answer = server.hear()
            assert (answer["error"]["code"], answer["id"]) == (code, request_id), line
        server.say(b"")
        server.greet()
        for line, code, request_id in UNREADABLE:
            server.say(line)
            answer = server.hear()
            assert (answer["error"]["code"], answer["id"]) == (code, request_id), line
        assert server.pong()
        assert server.rest()[:2] == (0, b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_without_a_traceback(number: signal.Signals) -> None:
    with started(warm()) as server:
        server.greet()
        server.process.send_signal(number)
        assert server.rest() == (-number, b"", b"")


@pytest.fixture(scope="module")
def waits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a content root with a probe that takes ten minutes, and of a cache with its index."""
    folder = tmp_path_factory.mktemp("waits")
    content = ContentRoot(folder / "content")
    content.incident("waits", WAITS, 'make(hung("sleep"), deadline_s=600)')
    variables = {"KB_ROOTS": str(content.path), "XDG_CACHE_HOME": str(folder / "cache")}
    assert run_kb_here("index", cwd=folder, stdin=b"", **variables).code == 0
    return variables


@pytest.fixture
def mark(waits: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the job of that probe writes its process id."""
    for name, value in {**waits, "MARK": str(tmp_path / "pid")}.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "pid"


@contextmanager
def verifying(mark: Path) -> Iterator[tuple[Raw, int]]:
    """A server that verifies with consent, and the process of the job that takes its time."""
    with started(warm("--allow-verify")) as server:
        server.greet()
        server.ask("tools/call", name="verify_fix", arguments={"id": "waits"})
        server.consent()
        wait_for(lambda: mark.exists() and mark.read_text(), "the job to begin")
        yield server, int(mark.read_text())


def test_a_client_that_vanishes_ends_what_runs_for_it(mark: Path) -> None:
    with verifying(mark) as (server, job):
        for stream in (server.process.stdout, server.process.stdin):
            assert stream
            stream.close()
        assert server.process.wait(GENEROUS_S) == 0
        wait_for(lambda: not is_running(job), "the job to be ended")
        assert server.process.stderr
        assert b"Traceback" not in server.process.stderr.read()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_what_runs_as_well(mark: Path, number: signal.Signals) -> None:
    with verifying(mark) as (server, job):
        server.process.send_signal(number)
        assert server.process.wait(GENEROUS_S) == -number
        wait_for(lambda: not is_running(job), "the job to be ended")


def test_a_call_that_is_cancelled_ends_what_runs_and_the_next_one_is_answered(mark: Path) -> None:
    with verifying(mark) as (server, job):
        server.cancel("tools/call")
        wait_for(lambda: not is_running(job), "the job to be ended")
        assert server.pong()


def test_a_call_that_is_cancelled_before_its_turn_disturbs_nobody_and_never_runs(mark: Path) -> None:
    with verifying(mark) as (server, job):
        server.ask("tools/call", "second", name="verify_fix", arguments={"id": "waits"})
        server.consent()
        server.cancel("second")
        assert server.pong()
        assert is_running(job)
        server.cancel("tools/call")
        wait_for(lambda: not is_running(job), "the job to be ended")
        assert server.process.stdin
        server.process.stdin.close()
        assert server.process.wait(GENEROUS_S) == 0
        assert mark.read_text() == str(job)


def test_a_root_that_is_none_is_a_usage_error(kb: Kb, tmp_path: Path) -> None:
    ended = kb("mcp", "--root", tmp_path)
    assert (ended.code, ended.out) == (2, "")
    assert "not a content root" in ended.err


@pytest.mark.parametrize("missing", ["fastapi", "mcp"])
def test_without_the_extra_it_names_it(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kb.cli.main import run; sys.exit(run(['mcp']))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 2
    assert f"`kb mcp` needs {missing}" in ended.stderr
    assert f"pip install -e '{CHECKOUT}[server]'" in ended.stderr


def test_the_sdk_leaves_the_log_of_the_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger()
    monkeypatch.setattr(log, "handlers", [])
    monkeypatch.setattr(log, "level", logging.WARNING)
    resolve_name("kb.api.mcp.server:Server")(resolve_name("kb.api.mcp.tools:Tools")(None))
    assert (log.handlers, log.level) == ([], logging.WARNING)
