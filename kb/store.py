"""The store of reports: one SQLite file that `kb verify` writes and that `kb history` and the API read.

A save is one transaction, so that a killed process leaves all of its reports or none. A file that is not
ours, is damaged, or comes from a newer kb is refused and never written to.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from sqlalchemy import JSON, URL, Column, Connection, DateTime, Engine, NullPool, create_engine
from sqlalchemy.exc import OperationalError, SQLAlchemyError
from sqlmodel import Field, Session, SQLModel, col, select

from kb.errors import StoreUnavailable
from kb.places import data_home

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


class StoredReport(SQLModel, table=True):
    """One report. The columns serve questions; `document` is the report as `kb verify --json` printed it."""

    __tablename__ = "report"

    id: int | None = Field(default=None, primary_key=True)
    entry_id: str = Field(index=True)
    verdict: str
    fidelity: str
    started_at: datetime.datetime = Field(sa_column=Column(DateTime, nullable=False))  # UTC; SQLite keeps no offset
    duration_s: float
    entry_digest: str
    probe_digest: str
    kb_version: str
    document: dict[str, Any] = Field(sa_column=Column(JSON, nullable=False))


def default_path() -> Path:
    """Where the reports of this user are kept."""
    return data_home() / "reports.db"


@dataclass(frozen=True, slots=True)
class Store:
    """Reports of earlier verifications. Every method raises `StoreUnavailable` and nothing else.

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

    def save(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Keep reports (`Report.to_json()`): all of them, or on an error none. Saving nothing proves that it works."""
        rows = [_row(document) for document in documents]
        with _border(self.path, "written"):
            _make_directory(self.path.parent)
            with Session(self._engine) as session:
                connection = _begin(session, "IMMEDIATE")
                if _admit(connection, self.path):
                    _create(connection)
                session.add_all(rows)
                session.commit()
                _set_journal(session.connection(), self.path)

    def history(self, entry_id: str | None = None, limit: int = 20) -> list[dict[str, Any]]:
        """The newest reports, newest first, of one entry or of all; at most `limit`."""
        newest = select(StoredReport).order_by(col(StoredReport.started_at).desc(), col(StoredReport.id).desc())
        if entry_id is not None:
            newest = newest.where(StoredReport.entry_id == entry_id)
        with _border(self.path, "read"):
            if not self.path.exists():
                return []
            with Session(self._engine) as session:
                is_empty = _admit(_begin(session, "DEFERRED"), self.path)
                return [] if is_empty else [row.document for row in session.exec(newest.limit(limit))]


def compare_wording(documents: Sequence[dict[str, Any]], digests: Mapping[str, str]) -> list[dict[str, Any]]:
    """The reports, each with `earlier_wording`: was another wording of the entry judged than the current one?

    `digests` are those of the entries now, by id. None: the entry is not among them, nobody can tell.
    """
    return [
        {**one, "earlier_wording": one["entry_digest"] != digests[one["id"]] if one["id"] in digests else None}
        for one in documents
    ]


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


def _row(document: Mapping[str, Any]) -> StoredReport:
    started = datetime.datetime.fromisoformat(document["started_at"]).astimezone(datetime.UTC)
    return StoredReport(
        entry_id=document["id"],
        verdict=document["verdict"],
        fidelity=document["fidelity"],
        started_at=started.replace(tzinfo=None),
        duration_s=document["duration_s"],
        entry_digest=document["entry_digest"],
        probe_digest=document["probe_digest"],
        kb_version=document["kb_version"],
        document=dict(document),
    )


@contextmanager
def _border(path: Path, verb: str) -> Iterator[None]:
    """Foreign errors become `StoreUnavailable`; the SQL and its values stay out of the message."""
    try:
        yield
    except (SQLAlchemyError, OSError, ValueError) as error:  # ValueError: a document that is no JSON
        cause = getattr(error, "orig", None) or error
        hint = HINTS.get(getattr(cause, "sqlite_errorname", ""), ELSEWHERE)
        raise StoreUnavailable(f"the store of reports {path} cannot be {verb}: {cause}", hint) from error
