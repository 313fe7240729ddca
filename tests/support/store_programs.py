"""Programs that write to a store, for tests that kill them or limit their space. `start_program` forks one."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

from sqlalchemy import event
from sqlalchemy.engine import Engine
from sqlmodel import Session

from kb.errors import StoreUnavailable
from kb.store.database import Database
from kb.store.reports import save
from tests.support.console import GENEROUS_S
from tests.support.warm_start import PIPE, Fork, start_warm

IMPORTS = (__name__, "kb.store.sqlite", "kb.store.postgresql", "alembic.command")


def start_program(name: str, *arguments: str | Path) -> Fork:
    """Run a function of this module in a new process."""
    return start_warm(*arguments, imports=IMPORTS, main=f"{__name__}:{name}", stdin=PIPE, stdout=PIPE, stderr=PIPE)


def run_program(name: str, *arguments: str | Path) -> str:
    """Run a function of this module, which must succeed, and return its standard output."""
    process = start_program(name, *arguments)
    out, err = process.communicate(GENEROUS_S)
    assert process.returncode == 0, err.decode()
    return out.decode()


def save_batches() -> None:
    """STORE BATCH NAME COUNT: save that many copies of a batch, after reading a line from standard input."""
    store, batch, name, count = sys.argv[1:]
    reports = json.loads(Path(batch).read_text())
    _answer("ready")
    sys.stdin.readline()
    for number in range(int(count)):
        save(Database.open(Path(store)), [{**report, "batch": f"{name}-{number}"} for report in reports])
        _answer(f"{name}-{number}")


def save_until_full() -> None:
    """STORE BATCH: save until files may not grow, and print the number of saved reports and the error."""
    store, batch = sys.argv[1:]
    document = json.loads(Path(batch).read_text())[0]
    resource.setrlimit(resource.RLIMIT_FSIZE, (128 << 10, 128 << 10))
    saved = 0
    try:
        while saved < 1000:
            save(Database.open(Path(store)), [document])
            saved += 1
    except StoreUnavailable as error:
        _answer(json.dumps([saved, error.message, error.hint]))


def migrate_until_full() -> None:
    """STORE: migrate it until files may not grow, and print the error."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (24 << 10, 24 << 10))
    try:
        Database.open(sys.argv[1]).prepare()
    except StoreUnavailable as error:
        _answer(f"{error.message} {error.hint}")


def migrate_killed() -> None:
    """STORE: migrate it, killed after the first write, then the second, and so on until done; print the schemas."""
    _compile()
    status, schemas = -1, list[int]()
    while status:
        schemas.append(_schema(sys.argv[1]))
        child = os.fork() or _prepare_killed(sys.argv[1], len(schemas))
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
    _answer(json.dumps(schemas))


def _prepare_killed(store: str, left: int) -> NoReturn:
    def count(_: Any, __: Any, statement: str, *___: Any) -> None:
        nonlocal left
        is_read = statement.lower().startswith(("select", "show")) or ("PRAGMA" in statement and "=" not in statement)
        left -= not is_read  # a read changes nothing, so a kill after it makes no difference
        if not left:
            os.kill(os.getpid(), signal.SIGKILL)

    event.listen(Engine, "after_cursor_execute", count)
    Database.open(store).prepare()
    os._exit(0)


def _schema(store: str) -> int:
    with Database.open(store) as database, Session(database.backend.engine) as session:
        return database.backend.begin(session.connection(), is_writing=False) if database.backend.exists() else 0


def migrate_together() -> None:
    """STORE: let four processes migrate it at the same moment, and print their exit codes."""
    _compile()
    fork = multiprocessing.get_context("fork")
    together = fork.Barrier(4)

    def prepare() -> None:
        together.wait()
        Database.open(sys.argv[1]).prepare()

    processes = [fork.Process(target=prepare) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    _answer(json.dumps([process.exitcode for process in processes]))


def _compile() -> None:
    """Import and compile in advance what each child needs."""
    with tempfile.TemporaryDirectory() as directory:
        Database.open(directory + "/any.db").prepare()


def _answer(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
