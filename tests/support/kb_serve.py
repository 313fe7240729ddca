"""A real `kb serve`, asked and ended as a person does."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.console import GENEROUS_S, KB, end, wait_for


class Serving:
    """A running `kb serve`. It logs to a file: a pipe that nobody reads would stop it."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
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
        """What it has said for people."""
        return [line for line in self.output.splitlines() if line.startswith("kb: ")]

    @property
    def logged(self) -> list[dict[str, Any]]:
        """What it has said for machines."""
        return [json.loads(line) for line in self.output.splitlines() if line.startswith("{")]

    def ask(
        self, method: str, path: str, body: bytes | None = None, /, **headers: str
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers in lower case, body); `_` in the name of a header stands for `-`."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=GENEROUS_S)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """(status, JSON document)."""
        status, _, body = self.ask("GET", path, **headers)
        return status, json.loads(body)

    def stop(self, number: signal.Signals) -> int:
        """The exit code after a signal."""
        self.process.send_signal(number)
        return self.process.wait(60)

    def _address(self) -> re.Match[str] | None:
        return re.search(r"serving on http://(\S+):(\d+) ", self.output)


@contextmanager
def serving(*args: str | Path, **environment: str) -> Iterator[Serving]:
    """A server that is ready."""
    with listening(*args, **environment) as server:
        wait_for(lambda: server.ask("GET", "/readyz")[0] == 200, "the server to be ready", GENEROUS_S)
        yield server


@contextmanager
def listening(*args: str | Path, **environment: str) -> Iterator[Serving]:
    """A server that may not be ready."""
    number, name = tempfile.mkstemp(".log", "serve-")
    with os.fdopen(number, "wb") as log:
        process = subprocess.Popen(
            [str(KB), "serve", "--port", "0", *map(str, args)],
            stdout=subprocess.DEVNULL,
            stderr=log,
            env={**os.environ, **environment},
        )
    try:
        yield Serving(process, Path(name))
    finally:
        try:
            end(process, signal.SIGTERM)
        finally:
            end(process)
        Path(name).unlink()
