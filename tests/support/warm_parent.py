"""The process that imports `kb` once and forks for whoever asks: see `warm_start`.

Each order is one connection: the order and three streams come in, the process id and then the exit code go out. Between
the two is a keeper, the parent of the fork: it reaps it when whoever asked has closed the connection.
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
    """That of this process, which ends after its threads and what is registered: to take all modules apart takes long."""

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
    """Keepers that have ended; so does their processor time count as that of the tests."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _order(listener: socket.socket) -> Any:
    """What this process is to be: a fork of the one that listens, which ends when its standard input does."""
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
    """Returns in a new process with these streams; the one that calls it stays behind until that has ended."""
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
    """As if it had been started as a script; what ends an interpreter ends this one."""
    script = ModuleType("__main__")
    script.__file__ = str(KB)  # what multiprocessing imports into its children
    sys.modules["__main__"] = script
    os.environ.clear()
    os.environ.update(order["environment"])
    os.chdir(order["directory"])
    for number, (name, errors) in enumerate(ERRORS.items()):
        stream = open(number, "w" if number else "r", 1 if number == 2 else -1, "utf-8", errors, closefd=False)  # noqa: SIM115  # for as long as it runs
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    sys.argv = [str(KB), *order["args"]]
    resolve_name(order["main"])()


if __name__ == "__main__":
    main()
