"""What goes wrong around an arm: a killed fork server or guard, an odd interpreter, files that a job left to trip kb."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from kb.runtime import processes
from tests.support.console import BREAKS, ContentRoot, Kb, arm_directories, end, is_running, wait_for
from tests.support.warm_start import PIPE, VERIFY, Fork, start_warm

WAITS = """
Path(os.environ["PIDS"], str(os.getpid())).touch()
Path(os.environ["PIDS"], "ready").touch()
time.sleep(600)
"""
KILLS_ITS_GUARD = """
if not is_fixed:
    code = "import os, sys, time; os.setsid(); open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    note = Path(os.environ["PIDS"], "child")
    subprocess.Popen([sys.executable, "-c", code, str(note)])
    while not note.exists() or not note.read_text():
        time.sleep(0.02)
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)
"""
STOPS_ITS_GUARD = "os.kill(os.getppid(), signal.SIGSTOP)\n" + WAITS


@pytest.fixture
def pids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pids"
    path.mkdir()
    monkeypatch.setenv("PIDS", str(path))
    return path


def start(*arguments: str) -> Fork:
    return start_warm(*arguments, imports=VERIFY, stdout=PIPE, stderr=PIPE)


def fork_server_of(process: Fork) -> int:
    children = [child for child in processes.descendants(process.pid) if child.parent == process.pid]
    return next(
        child.pid for child in children if b"forkserver" in Path(f"/proc/{child.pid}/cmdline").read_bytes().split(b"\0")
    )


def test_a_killed_fork_server_costs_its_arms_and_no_report(content: ContentRoot, pids: Path) -> None:
    """As by the OOM killer. Its pipe is broken then, which must not end kb."""
    content.incident("waits", WAITS)
    content.incident("breaks")
    process = start("verify", "waits", "breaks", "--json")
    try:
        wait_for((pids / "ready").exists, "the arm to run")
        os.kill(fork_server_of(process), signal.SIGKILL)
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    reports = {report["id"]: report for report in json.loads(out)["reports"]}
    assert reports["waits"]["verdict"] == "inconclusive"
    assert "fork server died" in reports["waits"]["reason"]
    assert set(reports) == {"waits", "breaks"}
    assert process.returncode == 3
    ranks = [int(path.name) for path in pids.iterdir() if path.name.isdigit()]
    wait_for(lambda: not any(map(is_running, ranks)), "the ranks to end")


def test_what_a_killed_guard_leaves_is_killed(kb: Kb, content: ContentRoot, pids: Path) -> None:
    content.incident("patricide", KILLS_ITS_GUARD)
    ended = kb("verify", "patricide", "--json", "--repeat", "1")
    assert ended.json["verdict"] == "inconclusive"
    assert "its guard died" in ended.json["reason"]
    assert not is_running(int((pids / "child").read_text()))
    assert not arm_directories()


@pytest.mark.slow
def test_a_stopped_guard_is_ended_with_its_rank_after_an_interruption(content: ContentRoot, pids: Path) -> None:
    content.incident("stops", STOPS_ITS_GUARD)
    process = start("verify", "stops", "--json")
    try:
        wait_for((pids / "ready").exists, "the arm to run")
        rank = next(int(path.name) for path in pids.iterdir() if path.name.isdigit())
        guard = processes.read_process(rank)
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    finally:
        end(process)
        for stream in (process.stdout, process.stderr):
            if stream:
                stream.close()
    assert guard
    assert not is_running(guard.parent)
    assert not is_running(rank)


TRAPS = {
    "fifo-as-log": 'os.unlink(ctx.path("rank0.log"))\nos.mkfifo(ctx.path("rank0.log"))',
    "fifo-as-facts": 'os.mkfifo(ctx.path("rank0.facts.json"))',
    "deep-facts": 'Path(ctx.path("rank0.facts.json")).write_text("[" * 200_000)',
    "facts-of-a-list": 'Path(ctx.path("rank0.facts.json")).write_text("[1]")',
    "odd-flight-record": 'Path(ctx.path("rank0.flight.json")).write_text("[{}, 3]")',
    "link-as-stacks": 'os.unlink(ctx.path("rank0.stacks"))\nos.symlink("/dev/zero", ctx.path("rank0.stacks"))',
    "closed-folder": 'os.makedirs(ctx.path("a/b"))\nos.chmod(ctx.path("a/b"), 0)\nos.chmod(ctx.path("a"), 0)',
}


def test_files_that_a_job_left_to_trip_kb_change_no_verdict(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    for name, body in TRAPS.items():
        content.incident(name, f"{body}\n{BREAKS}")
    ended = kb("verify", *TRAPS, "--json", "--repeat", "1", "--keep-logs", tmp_path / "logs")
    assert {report["id"]: report["verdict"] for report in ended.json["reports"]} == dict.fromkeys(TRAPS, "verified")
    assert not arm_directories()


def test_a_result_of_its_own_costs_the_probe_its_verdict_and_nobody_else(kb: Kb, content: ContentRoot) -> None:
    result = 'Path(ctx.path("rank0.json")).write_text({!r})\nos._exit(0)'
    content.incident("list", result.format("[1]"))
    content.incident("invented", result.format('{"outcome": "fine", "ended": "now"}'))
    content.incident("breaks")
    verdicts = {
        report["id"]: report["verdict"]
        for report in kb("verify", "list", "invented", "breaks", "--json").json["reports"]
    }
    assert verdicts == {"list": "other-failure", "invented": "other-failure", "breaks": "verified"}


@pytest.mark.slow
def test_thousands_of_nested_folders_are_removed(kb: Kb, content: ContentRoot) -> None:
    nested = 'os.mkdir("d")\nos.chdir("d")\nfor _ in range(2500):\n    os.mkdir("d")\n    os.chdir("d")\n'
    content.incident("nested", nested + BREAKS)
    ended = kb("verify", "nested", "--json", "--repeat", "1")
    assert (ended.json["verdict"], ended.json["leftovers"]) == ("verified", [])
    assert not arm_directories()


def test_measured_values_that_are_no_json_numbers_are_text(kb: Kb, content: ContentRoot) -> None:
    content.incident("nan", 'ctx.note(loss=float("nan"), scale=float("inf"))\n' + BREAKS)
    ended = kb("verify", "nan", "--json")
    report = json.loads(ended.out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert report["arms"]["control"]["ranks"][0]["facts"] == {"loss": "NaN", "scale": "Infinity"}


def wrapper(tmp_path: Path, text: str) -> Path:
    """An interpreter that does something before it becomes Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_an_interpreter_may_print_a_banner(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks")
    python = wrapper(tmp_path, f'echo "Welcome to {{the}} cluster"\nexec {sys.executable} "$@"')
    assert kb("verify", "breaks", "--json", "--python", python).json["verdict"] == "verified"


@pytest.mark.slow
def test_what_an_interpreter_leaves_in_the_background_is_not_waited_for(content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks")
    note = tmp_path / "background"
    python = wrapper(tmp_path, f'sleep 600 &\necho $! >> {note}\nexec {sys.executable} "$@"')
    process = start("verify", "breaks", "--json", "--python", str(python))
    try:
        out, _ = process.communicate(timeout=120)
    finally:
        left = [int(pid) for pid in note.read_text().split()]
        end(process)
    assert json.loads(out)["verdict"] == "verified"
    wait_for(lambda: not any(map(is_running, left)), "what was killed to be gone")


def test_the_overall_deadline_ends_an_interpreter_that_hangs(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks")
    ended = kb("verify", "breaks", "--json", "--timeout", "3", "--python", wrapper(tmp_path, "exec sleep 600"))
    assert (ended.code, ended.json["error"]["type"]) == (124, "deadline-exceeded")


def test_an_endless_line_of_an_interpreter_is_not_stored(kb: Kb, content: ContentRoot, tmp_path: Path) -> None:
    content.incident("breaks")
    ended = kb("verify", "breaks", "--json", "--python", wrapper(tmp_path, "exec tr '\\\\0' x < /dev/zero"))
    assert (ended.code, ended.json["error"]["type"]) == (2, "interpreter-error")


@pytest.mark.slow
def test_the_next_run_removes_what_a_killed_one_left(kb: Kb, content: ContentRoot) -> None:
    content.incident("breaks")
    left = Path(os.environ["TMPDIR"], "kb-preload-left")
    (left / "cache").mkdir(parents=True)
    young = Path(os.environ["TMPDIR"], "kb-arm-young")
    young.mkdir()
    wait_for(lambda: time.time() - left.stat().st_ctime > 11, "the directory to be old enough")
    young.chmod(0o700)  # changed just now
    assert kb("verify", "breaks").code == 0
    assert not left.exists()
    assert young.exists()
