"""The database behind the store: one SQLite file that `kb verify` writes and that `kb history` and the API read.

A save is one transaction, so that a killed process leaves all of its reports or none. A file that is not
ours, is damaged, or comes from a newer kb is refused and never written to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from sqlalchemy import URL, Connection, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlmodel import Session, SQLModel

from kb.errors import StoreUnavailable
from kb.places import data_home
from kb.store import tables  # noqa: F401 - declares them

APPLICATION = 0x6B625250  # "kbRP" in the header of the file tells it from another program's database
SCHEMA = 1
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
class Database:
    """Where kb keeps things. Every method raises `StoreUnavailable` and nothing else.

    Opening touches no file: the first save makes it, and reading one that does not exist finds nothing.
    Safe to share between threads; any number of processes may use one file.
    """

    path: Path
    _engine: Engine = field(repr=False)

    @classmethod
    def open(cls, path: Path | None = None) -> Self:
        """The store in a file, by default the user's own."""
        path = (path or default_path()).absolute()
        url = URL.create("sqlite", database=str(path))
        # isolation_level None: the driver begins no transaction of its own, `_begin` does.
        arguments = {"timeout": BUSY_S, "isolation_level": None}
        return cls(path, create_engine(url, poolclass=NullPool, connect_args=arguments))

    def close(self) -> None:
        self._engine.dispose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """A transaction: what is added in it is kept as a whole, or on an error not at all."""
        with _border(self.path, "written"):
            _make_directory(self.path.parent)
            with Session(self._engine) as session:
                connection = _begin(session, "IMMEDIATE")
                if _admit(connection, self.path):
                    _create(connection)
                yield session
                session.commit()
                _set_journal(session.connection(), self.path)

    @contextmanager
    def reading(self) -> Iterator[Session | None]:
        """A transaction that only reads; None when nothing was ever kept: reading makes no file."""
        with _border(self.path, "read"):
            if not self.path.exists():
                yield None
                return
            with Session(self._engine) as session:
                is_empty = _admit(_begin(session, "DEFERRED"), self.path)
                yield None if is_empty else session


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


def _make_directory(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory == default_path().parent:
        directory.chmod(0o700)


def _begin(session: Session, kind: str) -> Connection:
    """A transaction in which the header and the rows are of one moment; IMMEDIATE takes the write lock first."""
    connection = session.connection()
    connection.exec_driver_sql(f"BEGIN {kind}")
    return connection


def _admit(connection: Connection, path: Path) -> bool:
    """Refuse a database that is not ours or is newer than we are; True when it is still empty."""
    owner, version = _pragma(connection, "application_id"), _pragma(connection, "user_version")
    if owner == APPLICATION:
        if version > SCHEMA:
            message = f"{path} was written by a newer kb: its schema is {version}, this one knows {SCHEMA}"
            raise StoreUnavailable(message, "update kb: pip install --upgrade gpu-kb")
        return False
    if owner or version or connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
        raise StoreUnavailable(f"{path} is the database of another program", HINTS["SQLITE_NOTADB"])
    return True


def _set_journal(connection: Connection, path: Path) -> None:
    """After a save, so that only a file of ours is switched. When two meet, one switches; that is enough."""
    with suppress(OperationalError, OSError):
        connection.exec_driver_sql(f"PRAGMA journal_mode={journal_mode(path.resolve(), _mounts())}")


def _create(connection: Connection) -> None:
    SQLModel.metadata.create_all(connection, tables=[SQLModel.metadata.tables["report"]])
    connection.exec_driver_sql(f"PRAGMA application_id={APPLICATION}")
    connection.exec_driver_sql(f"PRAGMA user_version={SCHEMA}")


def _pragma(connection: Connection, name: str) -> int:
    return int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())


@contextmanager
def _border(path: Path, verb: str) -> Iterator[None]:
    """Foreign errors become `StoreUnavailable`; the SQL and its values stay out of the message."""
    try:
        yield
    except (SQLAlchemyError, OSError, ValueError) as error:  # ValueError: a document that is no JSON
        cause = getattr(error, "orig", None) or error
        hint = HINTS.get(getattr(cause, "sqlite_errorname", ""), ELSEWHERE)
        raise StoreUnavailable(f"the store of reports {path} cannot be {verb}: {cause}", hint) from error
