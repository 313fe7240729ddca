"""`kb` in a fork of a process that has already imported it: a separate process without the seconds of a start.

For tests of what a service does and how it ends. Tests of how it starts use `run_kb` or a new process.
This module requests forks, and imports only the standard library. `warm_parent` is the process that forks.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from tests.support.console import CHECKOUT, GENEROUS_S

# The address of one parent for all workers of a run. An abstract name, which needs no file and ends with its socket.
ADDRESS = f"\0kb-warm-{os.environ.get('PYTEST_XDIST_TESTRUNUID') or token_hex(16)}"
PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL
SERVICE = ("kb.cli.main", "kb.cli.commands.serve", "kb.api.app", "uvicorn.config", "uvicorn.server")
MCP = (*SERVICE, "kb.cli.commands.mcp", "kb.api.mcp.server", "mcp.server.stdio")
VERIFY = (
    "kb.cli.main",
    "kb.cli.commands.verify",
    "kb.cli.terminal.reports",
    "kb.store.sqlite",
    "kb.store.reports",
    "alembic.command",
)
ATTEMPTS = 5  # to find a parent, since a parent may be about to end


class Fork:
    """A process that is not a child of this one, with the members of `subprocess.Popen` that tests need."""

    def __init__(self, connection: socket.socket, pid: int, streams: Sequence[IO[bytes] | None]) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self.stdin, self.stdout, self.stderr = streams
        self._connection = connection

    def poll(self) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float) -> int:
        """Wait for the exit code, which is negative for a signal."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("kb", timeout)
            self.returncode = int(self._connection.recv(20))
            self._connection.close()
        return self.returncode

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        """Close its standard input, and return the rest of its standard output and error."""
        if self.stdin:
            self.stdin.close()
        assert self.stdout
        assert self.stderr
        with self.stdout, self.stderr, ThreadPoolExecutor(2) as readers:
            reading = [readers.submit(stream.read) for stream in (self.stdout, self.stderr)]
            try:
                self.wait(timeout)
            except subprocess.TimeoutExpired:
                self.kill()
                raise
            out, err = (item.result() for item in reading)
        return out, err

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)  # the id is not reused until `wait` has the exit code

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        self._connection.close()


def start_warm(
    *args: str | Path,
    imports: Sequence[str] = SERVICE,
    main: str = "kb.cli.main:main",
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | IO[bytes] = DEVNULL,
    stdout: int | IO[bytes] = DEVNULL,
    stderr: int | IO[bytes] = DEVNULL,
    address: str = ADDRESS,
) -> Fork:
    """Start `kb` with these arguments, or another `main`, after the parent has imported the modules in `imports`.

    PYTHON* variables and TZ have no effect, because Python reads them only when it starts.
    """
    order = {
        "args": [str(arg) for arg in args],
        "imports": imports,
        "main": main,
        "environment": dict(os.environ if env is None else env),
        "directory": str(cwd or Path.cwd()),
    }
    with ExitStack() as theirs:
        pairs = [
            _pair(stream, is_input, theirs) for stream, is_input in ((stdin, True), (stdout, False), (stderr, False))
        ]
        for _ in range(ATTEMPTS):
            connection = _connected(address)
            with suppress(ConnectionError):
                socket.send_fds(connection, [json.dumps(order).encode()], [number for number, _ in pairs])
                if pid := connection.recv(20):
                    return Fork(connection, int(pid), [ours for _, ours in pairs])
            connection.close()
    raise AssertionError("no process forks")


def _pair(stream: int | IO[bytes], is_input: bool, theirs: ExitStack) -> tuple[int, IO[bytes] | None]:
    """The file descriptor for the fork, and the other end for this process if it is a pipe."""
    if stream == PIPE:
        reading, writing = os.pipe()
        given, kept = (reading, writing) if is_input else (writing, reading)
        theirs.callback(os.close, given)
        return given, open(kept, "wb" if is_input else "rb")
    if stream == DEVNULL:
        number = os.open(os.devnull, os.O_RDWR)
        theirs.callback(os.close, number)
        return number, None
    return (stream if isinstance(stream, int) else stream.fileno()), None


def _connected(address: str) -> socket.socket:
    """A connection to the process that forks, which is started if necessary."""
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            connection.connect(address)
        except ConnectionRefusedError:
            connection.close()
            _start_parent(address)
        else:
            return connection


def _start_parent(address: str) -> None:
    """Start the process that forks. It ends with this process; others then start another."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(address)
        except OSError:  # another process is doing the same
            return
        listener.listen(128)
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.warm_parent", str(listener.fileno())],
            cwd=CHECKOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("KB_")},
            stdin=PIPE,
            stdout=DEVNULL,
            pass_fds=[listener.fileno()],
        )
    assert process.stdin
    for ending in (lambda: process.wait(GENEROUS_S), process.stdin.close):
        atexit.register(ending)  # called in reverse order
