"""A real `kb serve`, used and ended as by a person. Unless it is cold, it is a fork: see `warm_start`."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from tests.support.console import GENEROUS_S, KB, end, wait_for
from tests.support.warm_start import Fork, start_warm


class Serving:
    """A running `kb serve`. It logs to a file, because a pipe that nobody reads would block it."""

    def __init__(self, process: subprocess.Popen[bytes] | Fork, log: Path) -> None:
        self.process = process
        self.log = log
        wait_for(lambda: self._address() or process.poll() is not None, "the server to listen", GENEROUS_S)
        result = self._address()
        assert result, f"it ended before it served: {self.output}"
        self.host, self.port = result[1].strip("[]"), int(result[2])

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def lines(self) -> list[str]:
        """The lines of its log for people."""
        return [line for line in self.output.splitlines() if line.startswith("kb: ")]

    @property
    def logged(self) -> list[dict[str, Any]]:
        """The JSON documents in its log."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def ask(
        self, method: str, path: str, body: bytes | None = None, /, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Send a request and return (status, headers in lower case, body). `_` in the name of a header means `-`."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GENEROUS_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Get a path and return (status, JSON document)."""
        status, _, body = self.ask("GET", path, **headers)
        return status, json.loads(body)

    def wait_until_ready(self) -> None:
        wait_for(lambda: self.ask("GET", "/readyz")[0] == 200, "the server to be ready", GENEROUS_S)

    def stop(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def _address(self) -> re.Match[str] | None:
        return re.search(r"serving on http://(\S+):(\d+) ", self.output)


@contextmanager
def serving(*args: str | Path, **environment: str) -> Iterator[Serving]:
    """A server that is ready."""
    with listening(*args, **environment) as server:
        server.wait_until_ready()
        yield server


@contextmanager
def listening(*args: str | Path, **environment: str) -> Iterator[Serving]:
    """A server that may not be ready."""
    with _logged(lambda log: start_warm(*_command(args), env={**os.environ, **environment}, stderr=log)) as server:
        yield server


@contextmanager
def listening_cold(*args: str | Path, **environment: str) -> Iterator[Serving]:
    """The same, started as users start it, with its own interpreter."""
    command, env = [str(KB), *_command(args)], {**os.environ, **environment}
    with _logged(lambda log: subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=log)) as server:
        yield server


def _command(args: Sequence[str | Path]) -> list[str]:
    return ["serve", "--port", "0", *map(str, args)]


@contextmanager
def _logged(start: Callable[[IO[bytes]], subprocess.Popen[bytes] | Fork]) -> Iterator[Serving]:
    """The server that `start` starts, given a file to log to."""
    number, name = tempfile.mkstemp(".log", "serve-")
    with os.fdopen(number, "wb") as log:
        process = start(log)
    try:
        yield Serving(process, Path(name))
    finally:
        try:
            end(process, signal.SIGTERM)
        finally:
            end(process)
        Path(name).unlink()
