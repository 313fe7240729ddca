"""A store in one SQLite file. A damaged file or one of another program is refused and never written to."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError

from kb.errors import StoreUnavailable
from kb.paths import data_home

APPLICATION_ID = 0x6B625250  # "kbRP", in the header of each file that kb creates
BUSY_S = 10.0  # how long a writer waits for another writer; a write takes milliseconds
NETWORK_FILESYSTEMS = (
    "nfs",
    "cifs",
    "smb",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "gluster",
    "afs",
    "panfs",
    "weka",
    "9p",
    "fuse",
)
HINTS = {
    "SQLITE_BUSY": "another process is writing to it; try again",
    "SQLITE_CORRUPT": "kb does not change it: move it away, and kb creates a new one",
    "SQLITE_NOTADB": "kb does not change it: move it away, and kb creates a new one",
}
WRITABLE_HINT = "set XDG_DATA_HOME to a directory that you can write to and that has space left"


def default_path() -> Path:
    """The file with the reports of this user."""
    return data_home() / "reports.db"


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A file, created by the first write. The number of its schema is `user_version` in its header."""

    path: Path
    engine: Engine = field(repr=False)

    @classmethod
    def at(cls, path: Path) -> Self:
        path = path.absolute()
        url = URL.create("sqlite", database=str(path))
        # With isolation_level None, `begin` begins transactions, not the driver.
        arguments = {"timeout": BUSY_S, "isolation_level": None}
        return cls(path, create_engine(url, poolclass=NullPool, connect_args=arguments))

    @property
    def name(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.exists()

    def prepare_storage(self) -> None:
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory == default_path().parent:
            directory.chmod(0o700)
        with suppress(FileExistsError):  # SQLite would make it readable by all; journals get its mode
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def begin(self, connection: Connection, *, is_writing: bool) -> int:
        """Begin a transaction, which covers header and rows. IMMEDIATE takes the write lock at once."""
        if not is_writing:
            connection.exec_driver_sql("PRAGMA query_only=1")
        connection.exec_driver_sql(f"BEGIN {'IMMEDIATE' if is_writing else 'DEFERRED'}")
        return self.lock_schema(connection)

    def lock_schema(self, connection: Connection) -> int:
        """Read the header: the write lock is already held."""
        owner, schema = _pragma(connection, "application_id"), _pragma(connection, "user_version")
        if owner == APPLICATION_ID:
            return schema
        if owner or schema or connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
            raise StoreUnavailable(f"{self.path} is the database of another program", HINTS["SQLITE_NOTADB"])
        return 0

    def stamp(self, connection: Connection, schema: int) -> None:
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION_ID}")
        connection.exec_driver_sql(f"PRAGMA user_version={schema}")

    def after_commit(self) -> None:
        """Set the journal mode, now that the file is known to be kb's. If another process is in the way, skip it."""
        with suppress(OperationalError, OSError), self.engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA journal_mode={journal_mode(self.path.resolve(), _mounts())}")

    def hint(self, cause: BaseException) -> str:
        return HINTS.get(getattr(cause, "sqlite_errorname", ""), WRITABLE_HINT)


def journal_mode(path: Path, mounts: str) -> str:
    """WAL, or DELETE on a network filesystem, where WAL's shared memory is not shared (sqlite.org/wal.html).

    `mounts` is the text of /proc/mounts.
    """
    kinds = {Path(words[1]): words[2] for words in map(str.split, mounts.splitlines()) if len(words) > 2}
    kind = next((kinds[parent] for parent in path.parents if parent in kinds), "")
    return "DELETE" if kind.startswith(NETWORK_FILESYSTEMS) else "WAL"


def _mounts() -> str:
    file = Path("/proc/mounts")
    return file.read_text(errors="replace") if file.exists() else ""


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
