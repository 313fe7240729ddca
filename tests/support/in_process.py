"""`kb` in the process of the tests: everything except starting an interpreter, in a hundredth of the time."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, chdir, contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import IO
from unittest.mock import patch

from tests.support.console import Ended

HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ERRORS = {"stdin": "surrogateescape", "stdout": "strict", "stderr": "backslashreplace"}  # as set by Python


def run_kb_here(*args: str | Path, cwd: Path, stdin: bytes = b"", **env: str) -> Ended:
    """Run `kb` in this process.

    File descriptors 0, 1 and 2 are replaced too, so that child processes write where those of a real `kb` do.
    PYTHON* variables and TZ, which Python reads only when it starts, need a real `kb`.
    """
    assert not any(name.startswith("PYTHON") or name == "TZ" for name in env), "needs a process of its own"
    claim_streams = resolve_name("kb.cli.terminal.output:claim_streams")  # by name: no module may import a shell
    run = resolve_name("kb.cli.main:run")
    with ExitStack() as stack:
        out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
        for context in (_signal_handlers(), patch.dict(os.environ, env), chdir(cwd)):
            stack.enter_context(context)
        with _pipe(stdin) as given, _standard_streams(given, out.fileno(), err.fileno()):
            claim_streams()
            code: int = run([str(arg) for arg in args])
        return Ended(code, _content(out), _content(err))


@contextmanager
def _signal_handlers() -> Iterator[None]:
    """Restore the signal handlers after the block."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _pipe(data: bytes) -> Iterator[int]:
    """The read end of a pipe with this data."""
    reading, writing = os.pipe()

    def write() -> None:
        with suppress(BrokenPipeError), open(writing, "wb") as file:
            file.write(data)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield reading
    finally:
        os.close(reading)
        writer.join()


@contextmanager
def _standard_streams(*descriptors: int) -> Iterator[None]:
    """Use these file descriptors as standard input, output and error: as 0, 1 and 2, and in `sys`."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [os.dup(number) for number in range(3)]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    try:
        with ExitStack() as stack:
            for number, (name, errors) in enumerate(ERRORS.items()):
                mode = "w" if number else "r"
                stream = stack.enter_context(open(number, mode, encoding="utf-8", errors=errors, closefd=False))
                stack.enter_context(patch.object(sys, name, stream))
            yield
    finally:
        for number, descriptor in enumerate(saved):
            os.dup2(descriptor, number)
            os.close(descriptor)


def _content(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
