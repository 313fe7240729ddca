"""A store in one SQLite file. One that is not ours or is damaged is refused and never written to."""

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

APPLICATION = 0x6B625250  # "kbRP" in the header of the file tells it from another program's database
BUSY_S = 10.0  # how long a writer waits for another one; a save takes milliseconds
NETWORK = ("nfs", "cifs", "smb", "lustre", "gpfs", "beegfs", "ceph", "gluster", "afs", "panfs", "weka", "9p", "fuse")
HINTS = {
    "SQLITE_BUSY": "another process holds it; try again",
    "SQLITE_CORRUPT": "it is left as it is: move it away and a new one is begun",
    "SQLITE_NOTADB": "it is left as it is: move it away and a new one is begun",
}
ELSEWHERE = "set XDG_DATA_HOME to a directory that you can write to and that has space left"


def default_path() -> Path:
    """Where the reports of this user are kept."""
    return data_home() / "reports.db"


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A file, made by the first write. The number of its schema is `user_version` in its header."""

    path: Path
    engine: Engine = field(repr=False)

    @classmethod
    def at(cls, path: Path) -> Self:
        path = path.absolute()
        url = URL.create("sqlite", database=str(path))
        # isolation_level None: the driver begins no transaction of its own, `begin` does.
        arguments = {"timeout": BUSY_S, "isolation_level": None}
        return cls(path, create_engine(url, poolclass=NullPool, connect_args=arguments))

    @property
    def name(self) -> str:
        return str(self.path)

    def exists(self) -> bool:
        return self.path.exists()

    def make_room(self) -> None:
        directory = self.path.parent
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if directory == default_path().parent:
            directory.chmod(0o700)
        with suppress(FileExistsError):  # SQLite would let everybody read it; its journals get the mode of the file
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def begin(self, connection: Connection, *, is_writing: bool) -> int:
        """Header and rows are of one moment; IMMEDIATE takes the write lock first."""
        if not is_writing:
            connection.exec_driver_sql("PRAGMA query_only=1")
        connection.exec_driver_sql(f"BEGIN {'IMMEDIATE' if is_writing else 'DEFERRED'}")
        return self.hold(connection)

    def hold(self, connection: Connection) -> int:
        """The write lock holds it; here the file is looked at."""
        owner, schema = _pragma(connection, "application_id"), _pragma(connection, "user_version")
        if owner == APPLICATION:
            return schema
        if owner or schema or connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
            raise StoreUnavailable(f"{self.path} is the database of another program", HINTS["SQLITE_NOTADB"])
        return 0

    def mark(self, connection: Connection, schema: int) -> None:
        connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION}")
        connection.exec_driver_sql(f"PRAGMA user_version={schema}")

    def settle(self) -> None:
        """Set the journal: only now, so that only a file of ours is switched. Of two that meet, one does."""
        with suppress(OperationalError, OSError), self.engine.connect() as connection:
            connection.exec_driver_sql(f"PRAGMA journal_mode={journal_mode(self.path.resolve(), _mounts())}")

    def hint(self, cause: BaseException) -> str:
        return HINTS.get(getattr(cause, "sqlite_errorname", ""), ELSEWHERE)


def journal_mode(path: Path, mounts: str) -> str:
    """WAL, but not on a network filesystem: there its shared memory is not shared (sqlite.org/wal.html).

    `mounts` is the text of /proc/mounts.
    """
    kinds = {Path(words[1]): words[2] for words in map(str.split, mounts.splitlines()) if len(words) > 2}
    kind = next((kinds[parent] for parent in path.parents if parent in kinds), "")
    return "DELETE" if kind.startswith(NETWORK) else "WAL"


def _mounts() -> str:
    file = Path("/proc/mounts")
    return file.read_text(errors="replace") if file.exists() else ""


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
