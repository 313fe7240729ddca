"""Runs an external command, such as `nvidia-smi`, so that it can never block kb.

With a broken GPU driver `nvidia-smi` does not answer; with a dead network disk nothing does. So a command gets its own
session and a deadline, writes to files instead of pipes that a grandchild could hold open, is ended if it floods them,
and is left behind if even KILL does not end it. `kb.runtime.processes` reads /proc.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Self

from kb.runtime import processes

OUTPUT_BYTES = 256 << 10  # of each stream, from its beginning
FLOOD_BYTES = 16 << 20  # no command that kb runs prints this much, so it would only fill the disk
POLL_S = 0.005
GRACE_S = 0.3  # between TERM and KILL
KILLED_S = 2.0  # a killed process that still exists after this is stuck in the kernel

# `subprocess` waits, ignoring any timeout, until its child has executed the program, which never happens on a dead
# network disk. The shell is local and executes at once, so only the child waits for that disk.
SHELL = ("/bin/sh", "-c", 'exec "$@"', "sh")
NOT_STARTED = (126, 127)  # exit codes of the shell: the program cannot be executed, or is not found


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended: by itself, with an exit code; otherwise `failure` says why not.

    A negative exit code is the number of the signal that ended it. Output is cut at `OUTPUT_BYTES`.
    """

    exit_code: int | None
    stdout: str
    stderr: str
    failure: str = ""


def run(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a command to its end, but no longer than `timeout_s` plus the time it takes to kill it."""
    with Command(argv, timeout_s) as command:
        return command.result()


class Command:
    """A command that runs in the background of a `with` block; leaving the block ends it and its session."""

    def __init__(self, argv: Sequence[str], timeout_s: float) -> None:
        self._argv = tuple(argv)
        self._timeout_s = timeout_s
        self._failure = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._files: tuple[IO[bytes], ...] = ()
        self._open = ExitStack()

    def __enter__(self) -> Self:
        self._deadline = time.monotonic() + self._timeout_s
        try:
            out = self._open.enter_context(tempfile.TemporaryFile())
            err = self._open.enter_context(tempfile.TemporaryFile())
            self._files = (out, err)
            self._process = subprocess.Popen(
                [*SHELL, *self._argv], stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except OSError as error:
            self._failure = f"{self._argv[0]} cannot be started: {error}"
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._process:
            self._stop(self._process)
        self._open.close()

    def result(self) -> CommandResult:
        """Wait for the end, or end the command at the deadline. Call this once, inside the `with` block."""
        process = self._process
        if process is None:
            return CommandResult(None, "", "", self._failure)
        failure = self._wait(process)
        self._process = None
        stdout, stderr = (_read_output(file) for file in self._files)
        code = process.returncode
        if not failure and code in NOT_STARTED:
            failure = _not_started(self._argv[0], code, stderr)
        return CommandResult(None if failure else code, stdout, stderr, failure)

    def _wait(self, process: subprocess.Popen[bytes]) -> str:
        """Wait until the command ends, or end it. Returns why it had to be ended, or ""."""
        while not _has_ended(process):
            if time.monotonic() > self._deadline:
                return f"{self._argv[0]} did not end within {self._timeout_s:g} s{self._stop(process)}"
            if any(os.fstat(file.fileno()).st_size > FLOOD_BYTES for file in self._files):
                return f"{self._argv[0]} printed more than {FLOOD_BYTES >> 20} MiB{self._stop(process)}"
            time.sleep(POLL_S)
        _end_session(process)
        return ""

    def _stop(self, process: subprocess.Popen[bytes]) -> str:
        """Send the session TERM, then KILL. Returns a clause if the command survives even that, or ""."""
        _signal_session(process.pid, signal.SIGTERM)
        _has_ended_within(process, GRACE_S)
        _signal_session(process.pid, signal.SIGKILL)
        if _has_ended_within(process, KILLED_S):
            _end_session(process)
            return ""
        survivor = processes.read_process(process.pid)
        threading.Thread(target=process.wait, daemon=True).start()  # reaps the process if the kernel ever lets it go
        return (
            f" and cannot be killed, so it is left behind ({processes.waiting_in(survivor) if survivor else 'unseen'})"
        )


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it ended, without reaping it: while it is a zombie, its pid cannot identify another session."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.poll() is not None
    try:
        return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # kb's parent set SIGCHLD to be ignored, so there are no zombies
        return True


def _has_ended_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not _has_ended(process):
        if time.monotonic() > end:
            return False
        time.sleep(POLL_S)
    return True


def _end_session(process: subprocess.Popen[bytes]) -> None:
    """Kill what an ended command left running in the background, then reap the command."""
    _signal_session(process.pid, signal.SIGKILL)
    process.wait()


def _signal_session(leader: int, number: signal.Signals) -> None:
    """Signal every process of a session, since a job-control shell may have created several process groups."""
    with suppress(OSError):  # gone, or owned by another user
        os.killpg(leader, number)
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit() and int(name) != leader and _session_of(int(name)) == leader:
            member = processes.read_process(int(name))
            if member and _session_of(member.pid) == leader:
                processes.send_signal(member, number)


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _read_output(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(OUTPUT_BYTES).decode(errors="replace")


def _not_started(program: str, code: int, stderr: str) -> str:
    """Why the shell could not execute the program; its message ends with, for instance, `Permission denied`."""
    if "/" not in program and shutil.which(program) is None:
        return f"{program} is not installed"
    reason = stderr.strip().rpartition(": ")[2]
    return f"{program} cannot be started: {reason or f'exit code {code}'}"
