"""`kb serve` in a fork of a process that has imported it: a process of its own, without the seconds of a start.

For tests of what a service does. Those of how it starts and ends take `tests.support.kb_serve`.
Run as a module this is that process: each JSON line on its standard input starts a `kb`, it answers with the pid.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import select
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from kb.content import parser
from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from tests.support.console import CHECKOUT, GENEROUS_S

SHELL = ("kb.cli.main", "kb.cli.commands.serve", "kb.api.app", "uvicorn.config", "uvicorn.server")


class Fork:
    """A process that is no child of this one, with those methods of `subprocess.Popen` that tests need."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """0 when it has ended, however it did."""
        return 0 if select.select([self._descriptor], [], [], 0)[0] else None

    def wait(self, timeout: float) -> int:
        if not select.select([self._descriptor], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired("kb", timeout)
        return 0

    def send_signal(self, number: int) -> None:
        signal.pidfd_send_signal(self._descriptor, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def __del__(self) -> None:
        os.close(self._descriptor)


def start_warm(args: list[str], environment: Mapping[str, str], directory: Path, log: Path) -> Fork:
    """Start `kb` with these arguments and this environment; its messages are appended to the log."""
    order = {"args": args, "environment": dict(environment), "directory": str(directory), "log": str(log)}
    commands, answers = _parent()
    commands.write(json.dumps(order).encode() + b"\n")
    commands.flush()
    return Fork(json.loads(answers.readline()))


@cache
def _parent() -> tuple[IO[bytes], IO[bytes]]:
    """Standard input and output of the process that forks, one for this process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KB_")}
    process = subprocess.Popen(
        [sys.executable, "-m", __name__],
        cwd=CHECKOUT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin
    assert process.stdout
    for ending in (process.stdout.close, lambda: process.wait(GENEROUS_S), process.stdin.close):
        atexit.register(ending)  # called from the last to the first
    return process.stdin, process.stdout


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # who has ended is no zombie
    for name in SHELL:
        import_module(name)
    parser.parse_entry = cache(parser.parse_entry)
    load_catalog((builtin_root(),))
    gc.collect()
    gc.freeze()
    with os.fdopen(os.dup(1), "wb", buffering=0) as answers:
        while order := sys.stdin.buffer.readline():
            pid = os.fork()
            if pid == 0:
                answers.close()
                _become(json.loads(order))
            answers.write(f"{pid}\n".encode())


def _become(order: dict[str, Any]) -> None:
    code = 70
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        null, log = os.open(os.devnull, os.O_RDWR), os.open(order["log"], os.O_WRONLY | os.O_APPEND)
        for descriptor, source in enumerate((null, null, log)):
            os.dup2(source, descriptor)
        os.environ.clear()
        os.environ.update(order["environment"])
        os.chdir(order["directory"])
        sys.argv = ["kb", *order["args"]]
        import_module("kb.cli.main").main()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:  # never back into the loop: two processes would read one pipe
        os._exit(code)


if __name__ == "__main__":
    main()
