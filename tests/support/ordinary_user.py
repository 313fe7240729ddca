"""Runs functions as an ordinary user in a forked process."""

from __future__ import annotations

import ctypes
import json
import os
import signal
from collections.abc import Callable
from typing import Any, NoReturn

from kb.probe import Unavailable

NOBODY = 65534


def in_child(act: Callable[[], object]) -> Any:
    """Run `act` as an ordinary user in a new process and return its result. Raises `Unavailable` if `act` does."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer_and_end(act, writable)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    assert answer, "the child ended without an answer"
    kind, value = json.loads(answer)
    if kind == "Unavailable":
        raise Unavailable(value)
    assert kind == "returned", f"{kind}: {value}"
    return value


def answer_and_end(act: Callable[[], object], writable: int) -> NoReturn:
    end_in_20_s()
    try:
        become_ordinary()
        answer = ["returned", act()]
    except BaseException as error:
        answer = [type(error).__name__, str(error)]
    os.write(writable, json.dumps(answer).encode())
    os._exit(0)


def end_in_20_s() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)


def become_ordinary() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: makes this user the owner of /proc/self again
