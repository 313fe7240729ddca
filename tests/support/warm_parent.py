"""The process that imports `kb` once and forks on request: see `warm_start`.

Each request is one connection: it receives an order and three streams, and sends the process id and then the exit
code. The parent of the fork is a keeper, which reaps the fork when the requester has closed the connection.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import socket
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from kb.content import parser
from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from tests.support.console import KB
from tests.support.in_process import ERRORS


def main() -> None:
    how = ExitCode()
    atexit.register(how.end)
    listener = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGCHLD, _reap)
    parser.parse_entry = cache(parser.parse_entry)
    load_catalog((builtin_root(),))
    if order := _order(listener):
        with how:
            _become(order)


class ExitCode:
    """The exit code of this process, which ends after threads and exit handlers, without the slow module teardown."""

    code = 0

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SystemExit):
            self.code = error.code if isinstance(error.code, int) else bool(error.code)
        else:
            self.code = bool(error)

    def end(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(self.code)


def _reap(_number: int, _frame: object) -> None:
    """Reap keepers that have ended, so that their CPU time counts towards the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _order(listener: socket.socket) -> Any:
    """Return an order in a fork for each request, or None in the listening process when its standard input ends."""
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        message, streams, _, _ = socket.recv_fds(connection, 1 << 20, len(ERRORS), socket.MSG_CMSG_CLOEXEC)
        if message and _is_ours(connection):
            order = json.loads(message)
            for name in order["imports"]:
                import_module(name)
            gc.collect()
            gc.freeze()
            if os.fork() == 0:
                listener.close()
                _leave_keeper(connection, streams)
                return order
        connection.close()
        _close(streams)
    return None


def _is_ours(connection: socket.socket) -> bool:
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _leave_keeper(connection: socket.socket, streams: Sequence[int]) -> None:
    """Return in a new process with these streams. The calling process stays as its keeper until it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = os.fork()
    if pid == 0:
        connection.close()
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        _close(streams)
        return
    _close([*range(len(ERRORS)), *streams])
    with suppress(ConnectionError):
        connection.send(str(pid).encode())
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended
        connection.send(str(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status).encode())
        connection.recv(1)
    os.waitpid(pid, 0)
    os._exit(0)


def _close(numbers: Sequence[int]) -> None:
    for number in numbers:
        os.close(number)


def _become(order: Any) -> None:
    """Run the order as if this process had been started as a script."""
    script = ModuleType("__main__")
    script.__file__ = str(KB)  # imported by the children of multiprocessing
    sys.modules["__main__"] = script
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    for number, (name, errors) in enumerate(ERRORS.items()):
        stream = open(number, "w" if number else "r", 1 if number == 2 else -1, "utf-8", errors, closefd=False)  # noqa: SIM115  # stays open while the process runs
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [str(KB), *order["args"]]
    resolve_name(order["main"])()


if __name__ == "__main__":
    main()
