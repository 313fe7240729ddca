"""Real `kb serve` processes over one database, as several hosts would run them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import httpx

from kb.store import keys
from kb.store.database import Database
from kb.store.keys import Scope
from tests.support.console import GENEROUS_S, KB, end, wait_for
from tests.support.warm_start import Fork, start_warm


@dataclass
class Place:
    """The cache, database and content folder of replicas."""

    path: Path
    cache: Path
    more: dict[str, str] = field(default_factory=dict)

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("KB_")}
        own = {
            "HOME": str(self.path),
            "XDG_CACHE_HOME": str(self.cache),
            "XDG_DATA_HOME": str(self.path),
            "TMPDIR": str(self.path),
            "KB_DATABASE_URL": f"sqlite:///{self.path}/service.db",
        }
        return {**inherited, **own, **self.more}

    def database(self) -> Database:
        """Open the database, which the caller closes."""
        return Database.open(self.environment["KB_DATABASE_URL"])

    def key(self, scope: str) -> str:
        """A new API key."""
        with self.database() as database:
            return keys.new(database, f"for {scope}", Scope(scope))[1]


class Replica:
    """A running `kb serve`. It logs to a file, because a pipe that nobody reads would block it."""

    def __init__(self, process: subprocess.Popen[bytes] | Fork, log: Path) -> None:
        self.process = process
        self.log = log
        wait_for(lambda: process.poll() is not None or self._served(), "the replica to listen", GENEROUS_S)
        result = self._served()
        assert result, f"it ended before it served: {self.output}"
        self.url, self.port = result[1], int(result[2])

    @property
    def output(self) -> str:
        return self.log.read_text()

    def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Get a path and return (status, document)."""
        # It is plain HTTP, and reading this machine's certificates would take forty times as long as the answer.
        answer = httpx.get(self.url + path, headers=headers, timeout=60, trust_env=False, verify=False)
        return answer.status_code, json.loads(answer.content)

    def _served(self) -> re.Match[str] | None:
        return re.search(r"serving on (http://\S+:(\d+))", self.output)


@contextmanager
def started(place: Place, *args: str, prefix: Sequence[str] = ()) -> Iterator[Replica]:
    """A replica that is ready. With a `prefix`, which is a command that runs another, it starts as for users."""
    number, name = tempfile.mkstemp(".log", "replica-", place.path)
    log, command = Path(name), ["serve", "--port", "0", *args]
    with os.fdopen(number, "wb") as stderr:
        process = _start(prefix, command, place, stderr)
    try:
        replica = Replica(process, log)
        wait_for(lambda: replica.get("/readyz")[0] == 200, "the replica to be ready", GENEROUS_S)
        yield replica
    finally:
        end(process)


def _start(
    prefix: Sequence[str], command: Sequence[str], place: Place, stderr: IO[bytes]
) -> subprocess.Popen[bytes] | Fork:
    if not prefix:
        return start_warm(*command, env=place.environment, cwd=place.path, stderr=stderr)
    return subprocess.Popen(
        [*prefix, str(KB), *command], env=place.environment, cwd=place.path, stdout=subprocess.DEVNULL, stderr=stderr
    )
