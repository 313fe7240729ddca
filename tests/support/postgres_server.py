"""A PostgreSQL server that a test may kill and start again. The fixtures are in postgres.py."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psycopg

from tests.support.console import GENEROUS_S, is_running, wait_for

SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # safe when a server is killed, not when the power fails
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "autovacuum": "off",
}


def binaries() -> Path | None:
    """The folder with initdb and postgres, which Debian does not put on PATH."""
    result = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    if result:
        return max(result, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


@dataclass
class Server:
    """A server in its own directory. It refuses to run as root and then runs as another user."""

    binaries: Path
    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = field(default=None)

    @property
    def pid(self) -> int:
        assert self.process
        return self.process.pid

    def url(self, database: str = "postgres") -> str:
        return f"postgresql://kb@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server unless it is running, and wait until it answers."""
        if self.process and self.process.poll() is None:
            return
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.directory)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            command = self._as_user(self.binaries / "postgres", "-D", str(self.directory / "data"), *options)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        wait_for(self._answers, "PostgreSQL to answer")

    def kill(self) -> None:
        """Kill the server and all its processes with SIGKILL, as when its machine dies."""
        os.kill(self.pid, signal.SIGSTOP)  # so that it starts no process meanwhile
        family = [self.pid, *_children(self.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process
        self.process.wait(GENEROUS_S)
        wait_for(lambda: not any(map(is_running, family)), "PostgreSQL to be gone")

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop the server in the block, as on a machine that hangs: connections stay open without an answer."""
        family = [self.pid, *_children(self.pid)]
        for pid in family:
            os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            for pid in family:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGQUIT)
            self.process.wait(GENEROUS_S)

    def execute(self, sql: str, database: str = "postgres") -> None:
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            connection.execute(sql.encode())

    def init(self) -> None:
        how = ("-U", "kb", "--auth=trust", "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync")
        initdb = self._as_user(self.binaries / "initdb", "-D", str(self.directory / "data"), *how)
        subprocess.run(initdb, check=True, capture_output=True, cwd=self.directory, timeout=GENEROUS_S)

    def _answers(self) -> bool:
        assert self.process
        assert self.process.poll() is None, (self.directory / "log").read_text()
        try:
            psycopg.connect(self.url(), connect_timeout=5).close()
        except psycopg.OperationalError:
            return False
        return True

    def _as_user(self, program: Path, *arguments: str) -> list[str]:
        """The command, run as the server's user. Its process ends with this one, even if this one is killed."""
        result = user()
        change = (
            ["--reuid", str(result.pw_uid), "--regid", str(result.pw_gid), "--clear-groups"] if os.getuid() == 0 else []
        )
        return ["setpriv", "--pdeathsig", "INT", *change, str(program), *arguments]


def user() -> pwd.struct_passwd:
    with suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


HELD: list[socket.socket] = []


def free_port() -> int:
    """A port that nobody else gets until this process ends: it stays bound, and a server uses it with SO_REUSEADDR."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    HELD.append(held)
    port: int = held.getsockname()[1]
    return port
