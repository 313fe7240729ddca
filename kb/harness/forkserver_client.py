"""The client of one fork server (`kb.runtime.forkserver`): starts it, sends it arms, waits for them and ends it."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

from kb.errors import InterpreterError, LaunchError
from kb.harness import scratch
from kb.runtime import processes, start
from kb.runtime.guard import KILLED_S, NO_RECORD

START = Path(start.__file__)
READY_S = {False: 30.0, True: 180.0}  # importing torch from a cold network disk takes minutes
OUTSIDE_S = 15.0  # more than the guard's own grace and kill periods
LISTEN_S = 0.2  # how soon the listener notices that the client was closed
LONGEST_MESSAGE = 1 << 20  # bytes


class ForkClient:
    """Starts a fork server in an interpreter; with `preload` the server imports torch. Must be closed."""

    def __init__(self, python: Path, environment: Mapping[str, str], *, preload: bool) -> None:
        self._preload = preload
        self._python = python
        self._news = threading.Condition()
        self._pids: dict[str, int] = {}
        self._exited: dict[str, int] = {}
        self._ready = False
        self._dead = False
        self._closing = threading.Event()
        self._open = ExitStack()
        self._errors: IO[bytes] = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115
        cache = self._open.enter_context(scratch.directory("kb-preload-")) if preload else None
        argv = [str(python), str(START), "forkserver", *(["--preload", str(cache)] if cache else [])]
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=dict(environment),
                cwd="/",
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            self._open.close()
            raise InterpreterError(
                f"{python} cannot be started: {error.strerror}", "--python takes the path of a Python interpreter"
            ) from error
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def run(self, spec: dict[str, Any], limit_s: float) -> str:
        """Run one arm. Returns "" if its guard ended by itself, else why the harness failed."""
        try:
            self._wait(lambda: self._ready, READY_S[self._preload])
        except _NotInTime as error:
            raise InterpreterError(error.message, error.hint) from None
        self._send(spec)
        arm_id = spec["arm_id"]
        self._wait(lambda: arm_id in self._pids, 10.0)
        try:
            self._wait(lambda: arm_id in self._exited, limit_s)
        except _NotInTime:
            _kill_tree(self._pids[arm_id])
            return f"its guard did not end it within {limit_s:.0f} s"
        code = self._exited[arm_id]
        return "nothing could be written into its directory; is the disk full?" if code == NO_RECORD else ""

    def close(self) -> None:
        """Close the pipe, so that fork server and guards end. Waits up to `OUTSIDE_S`, then kills the guards."""
        if self._closing.is_set():
            return
        self._closing.set()
        with self._news:
            guards = [pid for arm_id, pid in self._pids.items() if arm_id not in self._exited]
        assert self._process.stdin and self._process.stdout
        with suppress(OSError):  # the fork server has died
            self._process.stdin.close()
        end = time.monotonic() + OUTSIDE_S
        while time.monotonic() < end and any((p := processes.read_process(pid)) and p.is_alive for pid in guards):
            time.sleep(0.02)
        for pid in guards:
            _kill_tree(pid)  # it was stopped, or is waiting for a process that cannot be killed
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(timeout=5)
        with suppress(OSError):  # what a wrapper or sitecustomize of the interpreter left in the background
            os.killpg(self._process.pid, signal.SIGKILL)
        self._listener.join(5)
        self._process.stdout.close()
        self._open.close()

    def _listen(self) -> None:
        for line in self._lines():
            message = _message(line)
            with self._news:
                self._ready |= "ready" in message
                if "started" in message:
                    self._pids[message["started"]] = message["pid"]
                if "exited" in message:
                    self._exited[message["exited"]] = message["code"]
                self._news.notify_all()
        with self._news:
            self._dead = True
            self._news.notify_all()

    def _lines(self) -> Iterator[bytes]:
        """Yield lines until the fork server has ended; its pipe may stay open in a process that it left behind."""
        assert self._process.stdout
        descriptor, received = self._process.stdout.fileno(), b""
        while len(received) < LONGEST_MESSAGE:
            if not select.select([descriptor], [], [], LISTEN_S)[0]:
                if self._closing.is_set() or self._process.poll() is not None:
                    return
                continue
            data = os.read(descriptor, 65536)
            if not data:
                return
            *lines, received = (received + data).split(b"\n")
            yield from lines

    def _send(self, spec: dict[str, Any]) -> None:
        assert self._process.stdin
        try:
            with self._news:
                self._process.stdin.write((json.dumps(spec) + "\n").encode())
                self._process.stdin.flush()
        except (OSError, ValueError) as error:
            raise LaunchError("the fork server has ended", "run the command again") from error

    def _wait(self, is_true: Callable[[], bool], seconds: float) -> None:
        with self._news:
            if not self._news.wait_for(lambda: is_true() or self._dead, seconds):
                raise _NotInTime(f"{self._python} did not answer within {seconds:.0f} s", "is its disk reachable?")
            if not is_true():
                raise self._died()

    def _died(self) -> LaunchError | InterpreterError:
        """Why the fork server ended; if it was not ready yet, the interpreter is to blame."""
        errors = ""
        with suppress(ValueError):  # closed in the meantime
            self._errors.seek(0)
            errors = self._errors.read(1 << 20)[-500:].decode(errors="replace").strip().replace("\n", " | ")
        if self._ready:
            return LaunchError(f"the fork server died: {errors}", "run the command again; was memory short?")
        return InterpreterError(
            f"{self._python} cannot run probes: {errors or 'it ended at once'}",
            "--python takes a Python interpreter, 3.9 or newer",
        )


def _message(line: bytes) -> dict[str, Any]:
    """Parse a message of the fork server; {} for any other line, such as the banner of an interpreter."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _kill_tree(pid: int) -> None:
    """Kill a guard and its descendants, and wait until they are gone, since signals do not take effect at once."""
    process = processes.read_process(pid)
    victims = [*processes.descendants(pid), *([process] if process else [])]
    for victim in victims:
        processes.send_signal(victim, signal.SIGKILL)
    end = time.monotonic() + KILLED_S
    while time.monotonic() < end and any(map(processes.is_running, victims)):
        time.sleep(0.02)


class _NotInTime(LaunchError):
    """The fork server did not do something in time."""
