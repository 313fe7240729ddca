"""Runs scans in separate processes, with limits on memory and processor time that the kernel enforces.

This bounds what hostile inputs cost; it is not a sandbox.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from kb.diagnose.inputs.sources import Stream
from kb.diagnose.isolation.job import Answer, Header, Job
from kb.diagnose.scan.scan import Limits

COMMAND = (sys.executable, "-P", "-m", "kb.diagnose.isolation.server")  # -P ignores a folder kb in the working folder

STDERR = 2  # standard output may be a protocol


class ScanServer:
    """Starts the process that forks for each scan, and restarts it if it has ended. Threads may share it."""

    def __init__(self, signatures: Iterable[dict[str, Any]]) -> None:
        self._signatures = list(signatures)
        self._lock = Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._is_closed = False

    def start(self) -> None:
        """Start the process before the first scan. Raises `OSError` if no process can be started."""
        with self._lock:
            self._running()

    def scan(self, streams: Sequence[Stream], seconds: float, memory: int, limits: Limits) -> Answer | None:
        """The answer, or None if the process ended without one. Raises `OSError` and the errors of the streams."""
        headers = [Header(stream.name, stream.modified, stream.most) for stream in streams]
        with self._connect() as connection:
            with suppress(BrokenPipeError, ConnectionResetError):  # it reads no further; its answer says why
                connection.send(Job(headers, seconds, memory, limits))
                for stream in streams:
                    for piece in filter(None, stream.pieces):
                        connection.send_bytes(piece)
                    connection.send_bytes(b"")
            try:
                answer: Answer = connection.recv()
            except (EOFError, ConnectionResetError):
                return None
            return answer

    def close(self) -> None:
        """End the process, and with it all scans."""
        with self._lock:
            self._is_closed = True
            if self._process:
                with suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
            self._end()

    def _connect(self) -> Connection:
        ours, theirs = socket.socketpair()
        with ours, theirs, self._lock:
            try:
                socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
            except (BrokenPipeError, ConnectionResetError):
                self._end()
                socket.send_fds(self._running(), [b"\0"], [theirs.fileno()])
            return Connection(ours.detach())

    def _running(self) -> socket.socket:
        if self._is_closed:
            raise BrokenPipeError("the scans were ended")
        if self._control is None:
            ours, theirs = socket.socketpair()
            with theirs:
                self._process = subprocess.Popen(COMMAND, stdin=theirs.fileno(), stdout=STDERR, process_group=0)
            self._control = ours
            setup = Connection(os.dup(ours.fileno()))
            with setup:
                setup.send(self._signatures)
        return self._control

    def _end(self) -> None:
        """Close the connection and wait for the process. Its scans go on if only the process was killed."""
        if self._control and self._process:
            self._control.close()
            self._process.wait()
        self._control = self._process = None
