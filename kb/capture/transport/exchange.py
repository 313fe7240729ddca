"""Runs the agent on nodes, some in parallel, each within a limit, and returns what they wrote by then.

One thread watches all of them. Input and output are files in memory, so that nothing blocks on a pipe. Local processes
for other nodes (ssh, srun, kubectl) end with kb, however kb ends. Each has its own session, so that Ctrl-C reaches only
kb, which then ends them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import IO

from kb.capture.transport.connection import Connection
from kb.errors import CaptureFailed

AT_ONCE = 32
MOST_BYTES = 128 << 20  # returned by one agent
MOST_ERRORS = 1 << 16
LOOK_S = 0.02
TERM_S, KILL_S = 1.0, 1.0  # for a transport to end its remote side, and for the kernel to end the rest
NOT_RETURNED = "did not return in {:.0f} s"
# A child of kb that ends with it, even if kb is killed, and has limited output. Then it executes ssh, srun or kubectl.
STARTER = """\
import ctypes, os, resource, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]),) * 2)
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
try:
    os.execvp(sys.argv[3], sys.argv[3:])
except OSError as error:
    sys.exit("%s: %s" % (sys.argv[3], error.strerror))
"""


@dataclass(frozen=True, slots=True)
class Reply:
    """`code` is None for a process that was ended at its limit; `began` and `ended` are seconds since the epoch."""

    output: bytes
    errors: str
    code: int | None
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began


@dataclass(frozen=True, slots=True)
class _Running:
    process: subprocess.Popen[bytes]
    out: IO[bytes]
    err: IO[bytes]
    began: float
    ends: float  # on the monotonic clock


def exchange(
    connections: Sequence[Connection], make_text: Callable[[int], str], limits_s: Callable[[int], float]
) -> list[Reply]:
    """The replies in the order of the connections. `make_text` and `limits_s` are called when a connection begins.

    Raises `CaptureFailed` if no process can be started.
    """
    waiting = list(range(len(connections)))[::-1]
    replies: dict[int, Reply] = {}
    with ExitStack() as files, _all_ended() as running:
        while waiting or running:
            while waiting and len(running) < AT_ONCE:
                number = waiting.pop()
                running[number] = _start(connections[number], make_text(number), limits_s(number), files)
            for number, child in list(running.items()):
                if child.process.poll() is not None or time.monotonic() > child.ends:
                    replies[number] = _reply(child)
                    del running[number]
            if running:
                time.sleep(LOOK_S)
    return [replies[number] for number in range(len(connections))]


def _start(connection: Connection, text: str, limit_s: float, files: ExitStack) -> _Running:
    out, err = files.enter_context(_memory("out")), files.enter_context(_memory("err"))
    below = [] if connection.is_here else [sys.executable, "-I", "-S", "-c", STARTER, str(os.getpid()), str(MOST_BYTES)]
    with _memory("in") as given:
        given.write(text.encode())
        given.seek(0)
        began = time.time()
        try:
            process = subprocess.Popen(
                [*below, *connection.command],
                stdin=given, stdout=out, stderr=err, start_new_session=True, env=connection.environment,
            )  # fmt: skip
        except OSError as error:
            raise CaptureFailed(f"no process could be started: {error.strerror}") from error
    return _Running(process, out, err, began, time.monotonic() + limit_s)


def _reply(child: _Running) -> Reply:
    code = child.process.poll()
    ended = time.time()
    if code is None:
        _end([child])
    output = os.pread(child.out.fileno(), MOST_BYTES, 0)
    errors = os.pread(child.err.fileno(), MOST_ERRORS, 0).decode("utf-8", "replace").strip()
    return Reply(output, errors, code, child.began, ended)


@contextmanager
def _all_ended() -> Iterator[dict[int, _Running]]:
    """End the processes that are left when the block ends, for example by Ctrl-C."""
    running: dict[int, _Running] = {}
    try:
        yield running
    finally:
        _end(list(running.values()))


def _end(given: Sequence[_Running]) -> None:
    """End processes: first ask, so that ssh and srun end their remote side, then kill. Leaves one in state D behind."""
    for number, seconds in ((signal.SIGTERM, TERM_S), (signal.SIGKILL, KILL_S)):
        left = [child.process for child in given if child.process.poll() is None]
        for process in left:
            try:
                os.killpg(process.pid, number)
            except OSError:
                continue
        until = time.monotonic() + seconds
        while left and time.monotonic() < until:
            time.sleep(LOOK_S)
            left = [process for process in left if process.poll() is None]
    for child in given:
        if child.process.returncode is None:
            child.process.returncode = -signal.SIGKILL  # otherwise Popen warns about it


def _memory(name: str) -> IO[bytes]:
    return os.fdopen(os.memfd_create(name), "w+b")
