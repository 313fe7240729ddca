"""`kb serve`: the real server, started, asked and ended as a person does."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from urllib.parse import quote

import pytest

from kb.search.query import LONGEST_TEXT
from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import CHECKOUT, ContentRoot, Kb, is_running, wait_for
from tests.support.in_process import run_kb_here
from tests.support.kb_serve import Serving, listening_cold, serving

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def private(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A content root that only `--root` names, and variables of a cache with its index."""
    folder = tmp_path_factory.mktemp("private")
    root = ContentRoot(folder / "team: private")
    root.entry("only-ours", title="A thing that only our team has")
    variables = {"XDG_CACHE_HOME": str(folder / "cache"), "KB_ROOTS": ""}
    assert run_kb_here("index", "--root", root.path, cwd=folder, stdin=b"", **variables).code == 0
    return root.path, variables


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, built_in_index: Path) -> Iterator[Serving]:
    """With every setting as it is by default."""
    home = str(tmp_path_factory.mktemp("home"))
    own = {"HOME": home, "XDG_CACHE_HOME": str(built_in_index), "XDG_DATA_HOME": home, "KB_ROOTS": ""}
    with listening_cold(**own) as started:
        started.wait_until_ready()
        yield started


def test_it_serves_a_private_root_and_the_built_in_entries(private: tuple[Path, dict[str, str]]) -> None:
    root, variables = private
    with serving("--root", root, **variables) as server:
        assert server.lines == [f"kb: serving on http://127.0.0.1:{server.port} (Ctrl-C ends it)"]
        status, result = server.get(f"/v1/search?q={quote('only our team')}")
        assert status == 200
        assert result["hits"][0]["id"] == "only-ours"
        assert result["hits"][0]["origin"] == str(root)
        _, result = server.get(f"/v1/search?q={quote('ALLGATHER timeout save')}&limit=1")
        assert result["hits"][0]["id"] == "checkpoint-save-allgather-timeout"
        assert server.get("/v1/entries/only-our")[1]["nearest"] == ["only-ours"]


def test_it_serves_the_reports_of_this_user(kb: Kb) -> None:
    assert kb("verify", "batch-size-invariant").code == 0
    with serving() as server:
        status, result = server.get("/v1/entries/batch-size-invariant/reports")
    assert status == 200
    assert [item["verdict"] for item in result["reports"]] == ["verified"]


def test_the_longest_query_passes_in_chinese_and_a_longer_one_is_a_problem(server: Serving) -> None:
    assert server.get(f"/v1/search?q={quote('断' * LONGEST_TEXT)}")[0] == 200
    status, problem = server.get(f"/v1/search?q={quote('断' * (LONGEST_TEXT + 1))}")
    assert (status, problem["errors"][0]["parameter"]) == (422, "q")


def test_an_answer_waits_for_no_acknowledgement() -> None:
    """Without TCP_NODELAY the head and the body of each answer lie 40 ms apart."""
    listen = resolve_name("kb.cli.commands.serve:_listen")
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname(), timeout=60):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_it_without_a_traceback_although_a_client_is_half_way(number: signal.Signals, code: int) -> None:
    with serving() as server, socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /v1/search?q=")
        assert server.get("/healthz")[0] == 200
        assert server.stop(number) == code
        assert "Traceback" not in server.output
        assert {line["level"] for line in server.logged} <= {"INFO"}
        with pytest.raises(OSError, match="refused"):
            socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_beyond_loopback_it_does_not_serve_before_there_is_a_key(kb: Kb, tmp_path: Path) -> None:
    ended = kb("serve", "--host", "0.0.0.0", "--port", "0")
    assert ended.code == 2
    assert "kb key new" in ended.err
    where = tmp_path / "service.db"
    with Database.open(where) as store:
        key, _ = keys.new(store, "test", Scope.READ)
        keys.revoke(store, key.id)
    assert kb("serve", "--host", "0.0.0.0", "--port", "0", KB_DATABASE_URL=str(where)).code == 2


def test_beyond_loopback_only_keys_get_answers_even_on_this_machine() -> None:
    with Database.open() as store:
        _, text = keys.new(store, "test", Scope.READ)
    with serving("--host", "0.0.0.0") as server:
        assert server.lines == [f"kb: serving on http://0.0.0.0:{server.port} (Ctrl-C ends it)"]
        assert server.get("/v1/entries")[0] == 401
        assert server.get("/v1/entries", Authorization=f"Bearer {text}")[0] == 200


def test_insecure_is_said_aloud_and_lets_everybody_read() -> None:
    with serving("--host", "0.0.0.0", "--insecure") as server:
        assert "INSECURE" in server.lines[0]
        assert "without a key" in server.lines[0]
        assert server.get("/v1/entries", Host="kb.example.org", X_Forwarded_For="192.0.2.1")[0] == 200


def test_the_environment_says_who_may_read_as_the_options_do() -> None:
    with serving(KB_ANONYMOUS="nobody") as server:
        assert server.get("/v1/entries")[0] == 401
    with serving(KB_ANONYMOUS="everybody") as server:
        assert "INSECURE" in server.lines[0]


@pytest.mark.parametrize(("name", "value"), [("KB_ANONYMOUS", "friends"), ("KB_RATE", "often")])
def test_a_setting_that_makes_no_sense_is_refused_before_anything_is_served(kb: Kb, name: str, value: str) -> None:
    ended = kb("serve", "--port", "0", "--workers", "2", **{name: value})
    assert ended.code == 2
    assert value in ended.err
    assert "serving" not in ended.err


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_database_of_an_unknown_kind_ends_all_workers_with_a_usage_error(kb: Kb, workers: str) -> None:
    ended = kb("serve", "--port", "0", "--workers", workers, KB_DATABASE_URL="mysql://h/db")
    assert ended.code == 2
    assert "Traceback" not in ended.err


def test_it_logs_json_lines_without_what_was_asked(server: Serving) -> None:
    server.get("/v1/search?q=secret-question", X_Request_ID="request-of-a-test")
    wait_for(lambda: "request-of-a-test" in server.output, "the line")
    (line,) = [line for line in server.logged if line.get("request_id") == "request-of-a-test"]
    assert "secret" not in server.output
    assert {name: line[name] for name in ("level", "method", "route", "status", "caller")} == {
        "level": "INFO",
        "method": "GET",
        "route": "/v1/search",
        "status": 200,
        "caller": "anonymous",
    }
    assert line["time"].endswith("+00:00")
    assert line["duration_ms"] > 0


def test_a_server_takes_as_many_connections_as_the_machine_allows(server: Serving) -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE) == (most, most)


def children(pid: int) -> set[int]:
    """Workers: what multiprocessing starts beside them, the resource tracker, is none."""
    result = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {item for item in result if b"spawn_main" in Path(f"/proc/{item}/cmdline").read_bytes()}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_several_workers_answer_alike_and_end_together(
    private: tuple[Path, dict[str, str]], number: signal.Signals, code: int
) -> None:
    root, variables = private
    with serving("--root", root, "--workers", "2", **variables) as server:
        workers = children(server.process.pid)
        assert len(workers) == 2
        for _ in range(20):
            assert server.get(f"/v1/search?q={quote('only our team')}")[1]["hits"][0]["id"] == "only-ours"
        wait_for(
            lambda: b'route="/v1/search",status="200"} 20.0' in server.ask("GET", "/metrics")[2],
            "the counts of both together",
        )
        assert server.stop(number) == code
        assert not any(map(is_running, workers))
        assert "Traceback" not in server.output


def test_no_worker_outlives_its_supervisor() -> None:
    with serving("--workers", "2") as server:
        workers = children(server.process.pid)
        os.kill(server.process.pid, signal.SIGKILL)
        wait_for(lambda: not any(map(is_running, workers)), "the workers to end")


def test_it_listens_on_loopback_alone_unless_told_otherwise(server: Serving) -> None:
    with pytest.raises(OSError, match="refused"):
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
    ended = kb("serve", "--root", tmp_path, "--port", "0")
    assert ended.code == 2
    assert "not a content root" in ended.err


@pytest.mark.parametrize("missing", ["fastapi", "uvicorn"])
def test_without_the_extra_it_names_it(missing: str, tmp_path: Path) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from kb.cli.main import run; sys.exit(run(['serve']))"
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False)
    assert ended.returncode == 2
    assert f"needs {missing}" in ended.stderr
    assert f"pip install -e '{CHECKOUT}[server]'" in ended.stderr
