"""A real PostgreSQL server for tests, and `database`: a store of the test's own, once in SQLite and once there.

A test file takes them by `pytest_plugins = ["postgres"]`. Without PostgreSQL its half is skipped; under
KB_REQUIRE_ALL=1 it fails instead.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import psycopg
import pytest
from support import GENEROUS_S, is_running, wait_for

from kb.store.database import Database

NUMBERS = count(1)
SETTINGS = {
    "listen_addresses": "127.0.0.1",
    "fsync": "off",  # a killed server loses nothing by it, a machine without power would
    "full_page_writes": "off",
    "shared_buffers": "16MB",
    "autovacuum": "off",
}


def binaries() -> Path | None:
    """Where initdb and postgres are: Debian keeps them off the PATH."""
    found = [path for path in Path("/usr/lib/postgresql").glob("*/bin") if (path / "initdb").exists()]
    if found:
        return max(found, key=lambda path: float(path.parent.name))
    on_path = shutil.which("initdb")
    return Path(on_path).resolve().parent if on_path else None


@dataclass
class Server:
    """One server in a directory of its own. It refuses to run as root, so it gets another user then."""

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
        """Start it unless it runs, and wait until it answers."""
        if self.process and self.process.poll() is None:
            return
        settings = {**SETTINGS, "port": str(self.port), "unix_socket_directories": str(self.directory)}
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with (self.directory / "log").open("ab") as log:
            command = self._as_user(self.binaries / "postgres", "-D", str(self.directory / "data"), *options)
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=self.directory)
        wait_for(self._answers, "PostgreSQL to answer")

    def kill(self) -> None:
        """SIGKILL for the server and every process of it, as when its machine dies."""
        family = [self.pid, *_children(self.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process
        self.process.wait(GENEROUS_S)
        wait_for(lambda: not any(map(is_running, family)), "PostgreSQL to be gone")

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
        """The command; it ends with this process even where that is killed."""
        user = _user()
        change = (
            ["--reuid", str(user.pw_uid), "--regid", str(user.pw_gid), "--clear-groups"] if os.getuid() == 0 else []
        )
        return ["setpriv", "--pdeathsig", "INT", *change, str(program), *arguments]


def _user() -> pwd.struct_passwd:
    with suppress(KeyError):
        return pwd.getpwnam("postgres")
    return pwd.getpwnam("nobody")


def _children(pid: int) -> list[int]:
    return [int(child) for task in Path(f"/proc/{pid}/task").glob("*/children") for child in task.read_text().split()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """The server, shared by all tests of a process. A test that kills it need not start it again."""
    found = binaries()
    if found is None:
        message = "PostgreSQL is not installed (Debian: apt-get install postgresql)"
        if os.environ.get("KB_REQUIRE_ALL") == "1":
            pytest.fail(message)
        pytest.skip(message)
    # Not below pytest's directories, which another user cannot enter; nor deep, for its socket has a short name.
    directory = Path(tempfile.mkdtemp(prefix="kb-postgres-", dir="/tmp"))
    if os.getuid() == 0:
        os.chown(directory, _user().pw_uid, _user().pw_gid)
    server = Server(found, directory, _free_port())
    try:
        server.init()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_template(postgres: Server) -> str:
    """A database with today's schema, to copy from: quicker than to migrate each."""
    postgres.start()
    postgres.execute("CREATE DATABASE migrated")
    with Database.open(postgres.url("migrated")) as opened:
        opened.prepare()
    return "migrated"


@pytest.fixture
def empty_postgres_url(postgres: Server) -> Iterator[str]:
    """The URL of a database without any table, of this test's own."""
    with _fresh(postgres, "template1") as url:
        yield url


@pytest.fixture
def postgres_url(postgres: Server, postgres_template: str) -> Iterator[str]:
    """The URL of a store with today's schema, of this test's own."""
    with _fresh(postgres, postgres_template) as url:
        yield url


@contextmanager
def _fresh(server: Server, template: str) -> Iterator[str]:
    server.start()
    name = f"test_{next(NUMBERS)}"
    server.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
    yield server.url(name)
    server.start()
    server.execute(f"DROP DATABASE {name} WITH (FORCE)")


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a store of this test's own is, of both kinds; for processes that open it themselves."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'store' / 'reports.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A store of this test's own, of both kinds."""
    with Database.open(database_url) as opened:
        yield opened
