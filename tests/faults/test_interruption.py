"""`kb verify` is interrupted, terminated and killed in the middle of an arm: no rank survives, nothing is torn."""

from __future__ import annotations

import json
import os
import pty
import signal
import sqlite3
import subprocess
import sys
import termios
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.console import CHECKOUT, GENEROUS_S, KB, ContentRoot, Kb, arm_directories, end, is_running, wait_for
from tests.support.warm_start import PIPE, VERIFY, Fork, start_warm

WAITS = """
Path(os.environ["PIDS"], str(os.getpid())).touch()
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(600)"])
Path(os.environ["PIDS"], str(child.pid)).touch()
Path(os.environ["PIDS"], "ready").touch()
time.sleep(600)
"""


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pids"
    path.mkdir()
    monkeypatch.setenv("PIDS", str(path))
    return path


@pytest.fixture
def waiting(content: ContentRoot, pids: Path, tmp_path: Path) -> Iterator[Fork]:
    """`kb verify` with an arm that runs, and has a child in a session of its own."""
    content.incident("waits", WAITS, 'make(raised("the thing broke"), deadline_s=300)')
    process = start_warm("verify", "waits", "--json", imports=VERIFY, cwd=tmp_path)
    try:
        wait_for((pids / "ready").exists, "the arm to run")
        yield process
    finally:
        end(process)


def ranks(pids: Path) -> list[int]:
    return [int(path.name) for path in pids.iterdir() if path.name.isdigit()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_its_arms_first_and_says_130(waiting: Fork, pids: Path, number: signal.Signals) -> None:
    waiting.send_signal(number)
    assert waiting.wait(60) == 130
    assert not any(map(is_running, ranks(pids)))
    assert not arm_directories()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_verdicts_that_were_there_before_an_interruption_are_shown_and_saved(
    kb: Kb, content: ContentRoot, pids: Path, number: signal.Signals
) -> None:
    content.incident("breaks")
    content.incident("waits", WAITS, 'make(raised("the thing broke"), deadline_s=300)')
    process = start_warm("verify", "breaks", "waits", "--json", imports=VERIFY, stdout=PIPE, stderr=PIPE)
    try:
        wait_for((pids / "ready").exists, "the other arm to run")
        wait_for(lambda: kb("history", "--json").json["reports"], "the first report to be saved")
        process.send_signal(number)
        process.send_signal(number)  # as `timeout` does
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    document = json.loads(out)
    assert process.returncode == 130
    assert (document["ok"], document["error"]["type"]) == (False, "interrupted")
    assert [report["id"] for report in document["reports"]] == ["breaks"]
    assert document["summary"] == {"verified": 1}
    assert [report["id"] for report in kb("history", "--json").json["reports"]] == ["breaks"]
    assert not any(map(is_running, ranks(pids)))
    assert not arm_directories()


def test_each_verdict_is_printed_when_it_is_there(content: ContentRoot, pids: Path) -> None:
    content.incident("breaks")
    content.incident("waits", WAITS, 'make(raised("the thing broke"), deadline_s=300)')
    process = start_warm("verify", "waits", "breaks", imports=VERIFY, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline().startswith(b"1/2  verified         breaks"), "while the other one runs"
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 130
    assert out == b"1 verified\n"


SLOW_TO_READ = """
import os, time
from pathlib import Path

pids = Path(os.environ["PIDS"])
for _ in range(90):  # a probe may take ten seconds to be read
    if (pids / "go").exists():
        break
    time.sleep(0.1)
(pids / "read").touch()
"""


def test_the_first_verdict_waits_for_no_other_probe_to_be_read(content: ContentRoot, pids: Path) -> None:
    content.incident("breaks")
    content.raw_probe("slow", SLOW_TO_READ)
    process = start_warm("verify", "breaks", "slow", imports=VERIFY, stdout=PIPE, stderr=PIPE)
    try:
        assert process.stdout
        assert process.stdout.readline().startswith(b"1/2  verified         breaks")
        assert not (pids / "read").exists()
        (pids / "go").touch()
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    assert process.returncode == 3
    assert b"2/2  inconclusive     slow" in out, "a file without a probe"


def test_killed_it_leaves_no_rank_and_no_directory(waiting: Fork, pids: Path) -> None:
    waiting.kill()
    waiting.wait(30)
    wait_for(lambda: not any(map(is_running, ranks(pids))), "the ranks to end without their supervisor")
    wait_for(lambda: not arm_directories(), "the guard to delete the arm's directory")


def test_killed_while_it_saves_it_leaves_an_intact_store(kb: Kb, content: ContentRoot, home: Path) -> None:
    content.incident("breaks")
    assert kb("verify", "breaks").code == 0
    process = start_warm("verify", "breaks", imports=VERIFY)
    database = next((home / "data").rglob("*.db"))
    wal = database.with_name(database.name + "-wal")
    wait_for(lambda: wal.exists() or process.poll() is not None, "the second report to be written")
    end(process)
    with sqlite3.connect(database) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    connection.close()
    assert len(kb("history", "breaks", "--json").json["reports"]) >= 1


def test_a_terminal_is_sane_after_a_kill(content: ContentRoot, pids: Path, tmp_path: Path) -> None:
    """Killed without warning, it has hidden no cursor and changed no mode of the terminal it drew on."""
    content.incident("waits", WAITS, 'make(raised("the thing broke"), deadline_s=300)')
    leader, follower = pty.openpty()
    before = termios.tcgetattr(follower)
    process = start_warm(
        "verify", "waits", imports=VERIFY, cwd=tmp_path, stdin=follower, stdout=follower, stderr=follower
    )
    drawn = b""
    try:
        wait_for((pids / "ready").exists, "the arm to run")
        while b"control" not in drawn:
            drawn += os.read(leader, 4096)
    finally:
        end(process)
    assert termios.tcgetattr(follower) == before
    assert b"\x1b[?25l" not in drawn, "the cursor stays visible"
    wait_for(lambda: not any(map(is_running, ranks(pids))), "the ranks to end")
    os.close(leader)
    os.close(follower)


def test_the_overall_deadline_is_exit_124_with_one_document(kb: Kb, content: ContentRoot, pids: Path) -> None:
    content.incident("waits", WAITS, 'make(raised("the thing broke"), deadline_s=300)')
    ended = kb("verify", "waits", "--json", "--timeout", "4")
    assert ended.code == 124
    assert ended.json["ok"] is False
    assert ended.json["error"]["type"] == "deadline-exceeded"
    assert ended.json["verdict"] == "inconclusive"
    assert not any(map(is_running, ranks(pids)))
    assert not arm_directories()


def test_a_termination_is_an_interruption_for_every_command() -> None:
    process = subprocess.Popen([str(KB), "redact", "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    try:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"a line\n")
        assert process.stdout.readline() == b"a line\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 130
    finally:
        end(process)
        for stream in (process.stdin, process.stdout):
            if stream:
                stream.close()


STARTING = """
import os, sys
from importlib.metadata import EntryPoint

number, entry_point = int(sys.argv[1]), sys.argv[2]

class Signal:
    def find_spec(self, name, *rest):
        if name == "typer":  # long before any code of a command
            os.kill(os.getpid(), number)

sys.meta_path.insert(0, Signal())
main = EntryPoint("kb", entry_point, "console_scripts").load()
sys.argv[1:] = ["list", "--json"]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_while_it_starts_it_ends_as_it_does_later(number: signal.Signals) -> None:
    entry_point = tomllib.loads((CHECKOUT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["kb"]
    command = [sys.executable, "-c", STARTING, str(int(number)), entry_point]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S)
    assert ended.returncode == 130
    assert json.loads(ended.stdout)["error"]["type"] == "interrupted"
    assert ended.stderr == ""
