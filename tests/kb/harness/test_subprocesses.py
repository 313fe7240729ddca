"""kb.commands against real processes: whatever a command does, we get an answer and it is gone."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kb.harness import subprocesses
from kb.harness.subprocesses import OUTPUT_BYTES, Command, run
from kb.runtime import processes

Script = Callable[[str], str]
FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """Write an executable shell script and give its path."""

    def write(text: str) -> str:
        path = tmp_path / "command"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return str(path)

    return write


@pytest.fixture
def frozen() -> Iterator[Path]:
    """A cgroup whose processes sit in state D, out of reach of KILL, until the test is over."""
    group = FREEZER / f"kb-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("no version 1 freezer cgroup can be made here")
    try:
        yield group
    finally:
        (group / "freezer.state").write_text("THAWED")
        while (group / "cgroup.procs").read_text():
            time.sleep(0.01)
        group.rmdir()


def is_gone(pid: int) -> bool:
    """Whether the process ends; a killed one takes a moment."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        process = processes.read_process(pid)
        if process is None or not process.is_alive:
            return True
        time.sleep(0.01)
    return False


def read_pid(path: Path) -> int:
    while not path.exists() or not path.read_text().endswith("\n"):
        time.sleep(0.01)
    return int(path.read_text())


def test_gives_exit_code_and_both_streams(script: Script) -> None:
    ran = run([script('echo "$1"; echo err >&2; exit 3'), "out put"], 10)
    assert (ran.exit_code, ran.stdout, ran.stderr, ran.failure) == (3, "out put\n", "err\n", "")


def test_a_signal_is_a_negative_exit_code(script: Script) -> None:
    assert run([script("kill -SEGV $$")], 10).exit_code == -signal.SIGSEGV


def test_standard_input_is_empty() -> None:
    assert run(["cat"], 10).exit_code == 0


def test_bytes_that_are_no_text_are_replaced(script: Script) -> None:
    assert run([script(r"printf '\377ok'")], 10).stdout == "\ufffdok"


def test_a_missing_program_is_a_failure() -> None:
    ran = run(["kb-no-such-program"], 10)
    assert (ran.exit_code, ran.failure) == (None, "kb-no-such-program is not installed")


def test_a_missing_path_is_a_failure(tmp_path: Path) -> None:
    ran = run([str(tmp_path / "python")], 10)
    assert ran.exit_code is None
    assert ran.failure.startswith(f"{tmp_path}/python cannot be started: ")


def test_a_file_that_may_not_be_executed_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "python").touch(stat.S_IRUSR)
    assert run([str(tmp_path / "python")], 10).failure.endswith("cannot be started: Permission denied")


def test_no_place_for_temporary_files_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert run(["true"], 10).failure.startswith("true cannot be started: ")


def test_a_command_that_ignores_term_is_killed(script: Script) -> None:
    ran = run([script("trap '' TERM; echo $$; while :; do sleep 1000; done")], 1.0)
    assert ran.exit_code is None
    assert ran.failure.endswith("command did not end within 1 s")
    assert is_gone(int(ran.stdout))


def test_a_command_may_clean_up_when_it_is_terminated(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocesses, "GRACE_S", 30.0)
    ran = run([script("trap 'echo cleaned; exit 1' TERM; echo ready; sleep 1000 & wait")], 1.0)
    assert ran.stdout == "ready\ncleaned\n"
    assert ran.failure


def test_a_grandchild_that_keeps_the_output_open_does_not_keep_us(script: Script) -> None:
    ran = run([script("sleep 1000 & echo $!")], 60)
    assert (ran.exit_code, ran.failure) == (0, "")
    assert is_gone(int(ran.stdout))


def test_other_process_groups_of_the_session_end_too(script: Script) -> None:
    ran = run([script("set -m; sleep 1000 & echo $!; sleep 1000")], 1.0)
    assert ran.failure
    assert is_gone(int(ran.stdout))


def test_a_flood_is_cut_off() -> None:
    ran = run(["yes"], 60)
    assert ran.failure == "yes printed more than 16 MiB"
    assert len(ran.stdout) == OUTPUT_BYTES


def test_long_output_is_kept_from_its_beginning(script: Script) -> None:
    ran = run([script("echo first; head -c 1000000 /dev/zero")], 60)
    assert ran.exit_code == 0
    assert ran.stdout.startswith("first\n")
    assert len(ran.stdout) == OUTPUT_BYTES


def test_leaving_the_block_ends_the_command(script: Script, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), Command([script(f"echo $$ > {tmp_path}/pid; sleep 1000")], 60):
        pid = read_pid(tmp_path / "pid")
        raise KeyboardInterrupt
    assert is_gone(pid)


def test_commands_run_beside_each_other(script: Script, tmp_path: Path) -> None:
    """Each waits for the other to have started."""
    path = script(f"touch {tmp_path}/$1; until [ -e {tmp_path}/$2 ]; do sleep 0.01; done; echo $1")
    with Command([path, "a", "b"], 60) as first, Command([path, "b", "a"], 60) as second:
        assert (first.result().stdout, second.result().stdout) == ("a\n", "b\n")


def test_a_program_whose_disk_does_not_answer_does_not_keep_us(script: Script) -> None:
    """A write lease held by another process blocks whoever executes the file, as a dead network disk does."""
    path = script("echo executed")
    holder = (
        "import fcntl, os, signal, sys\n"
        "signal.signal(signal.SIGIO, signal.SIG_IGN)\n"
        "fcntl.fcntl(os.open(sys.argv[1], os.O_RDWR), fcntl.F_SETLEASE, fcntl.F_WRLCK)\n"
        "print('held', flush=True)\n"
        "sys.stdin.read()\n"
    )
    argv = [sys.executable, "-c", holder, path]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout
        if not process.stdout.readline():
            pytest.skip("this file system gives no leases")
        ran = run([path], 0.5)
        process.communicate()
    assert ran.failure == f"{path} did not end within 0.5 s"
    assert ran.stdout == ""


def test_what_cannot_be_killed_is_left_behind_and_named(script: Script, frozen: Path, tmp_path: Path) -> None:
    path = script(f"echo $$ > {frozen}/cgroup.procs; echo $$ > {tmp_path}/pid; sleep 1000")
    with Command([path], 1.0) as command:
        pid = read_pid(tmp_path / "pid")
        (frozen / "freezer.state").write_text("FROZEN")
        ran = command.result()
    assert ran.exit_code is None
    assert " did not end within 1 s and cannot be killed, so it is left behind (D" in ran.failure
    (frozen / "freezer.state").write_text("THAWED")
    assert is_gone(pid)
