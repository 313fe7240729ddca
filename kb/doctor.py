"""Health checks of kb itself: index, store, clashing names, the interpreter for probes, leftovers of earlier runs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kb.content.roots import Root
from kb.errors import KbError
from kb.harness import scratch, subprocesses
from kb.installation import install_command
from kb.search import index_cache

TORCH_S = 120.0


@dataclass(frozen=True, slots=True)
class HealthCheck:
    """The result of one check. `hint` says what to do if it failed, or what else is possible."""

    subject: str
    is_fine: bool
    message: str
    hint: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"subject": self.subject, "is_fine": self.is_fine, "message": self.message, "mend": self.hint}


def run_checks(roots: tuple[Root, ...], python: Path, *, is_named: bool) -> Iterator[HealthCheck]:
    """All checks, cheap ones first. `is_named`: the caller named the interpreter for probes."""
    yield check_content(roots)
    yield check_index(roots)
    yield check_store()
    if url := os.environ.get("KB_DATABASE_URL"):
        yield check_database(url)
    yield check_command_name()
    yield check_import_name()
    yield check_leftovers()
    yield check_torch(python, is_named=is_named)


def check_content(roots: tuple[Root, ...]) -> HealthCheck:
    count = sum(len(root.entry_files()) for root in roots)
    names = ", ".join(root.name for root in roots)
    if count:
        return HealthCheck("content", True, f"{count} entry files in {names}")
    return HealthCheck(
        "content", False, f"no entry files in {names}", "install kb again, or set KB_ROOTS to a content root"
    )


def check_index(roots: tuple[Root, ...]) -> HealthCheck:
    """Check that the index exists, is fresh and readable. If not, the next search builds it, if it can be written."""
    home = index_cache.home(roots)
    opened = index_cache.open_if_fresh(roots)
    if opened:
        with opened:
            count, problems = len(opened), len(opened.problems)
        if problems:
            return HealthCheck("index", False, f"{problems} entries were left out of it", "`kb lint` says why")
        return HealthCheck("index", True, f"{count} entries, fresh, in {home}")
    existing = next(parent for parent in (home, *home.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return HealthCheck(
            "index",
            False,
            f"{home} cannot be written: every search builds the index in memory",
            "set XDG_CACHE_HOME to a writable directory",
        )
    if (home / "current.json").exists():
        return HealthCheck(
            "index", False, f"the index in {home} is stale or cannot be read", "`kb index --force` builds it again"
        )
    return HealthCheck("index", True, "not built yet: the first search does it")


def check_store() -> HealthCheck:
    from kb.store import reports
    from kb.store.database import Database

    try:
        with Database.open() as check_database:
            reports.save(check_database, [])
            return HealthCheck("store", True, f"writable, {check_database.name}")
    except KbError as error:
        return HealthCheck("store", False, error.message, error.hint)


def check_database(url: str) -> HealthCheck:
    """Check the database of a service. Does not create it, since the service could not write another user's file."""
    from kb.store import reports
    from kb.store.database import Database

    try:
        with Database.open(url) as opened:
            with opened.reading() as session:
                exists = session is not None
            if not exists:
                hint = "create it with `kb key new`, run as the user of the service; or is KB_DATABASE_URL wrong?"
                return HealthCheck("database", False, f"nothing is stored in {opened.name} yet", hint)
            reports.save(opened, [])
            return HealthCheck("database", True, f"writable, {opened.name}")
    except KbError as error:
        return HealthCheck("database", False, error.message, error.hint)


def check_command_name() -> HealthCheck:
    """Check that no other `kb` comes first on PATH, such as the command of the package kb-manager."""
    ours = Path(sys.argv[0]).resolve()
    commands = [Path(part) / "kb" for part in os.get_exec_path() if (Path(part) / "kb").is_file()]
    others = [path for path in commands if path.resolve() != ours] if ours.name == "kb" else []
    if others and (not commands or commands[0].resolve() != ours):
        return HealthCheck(
            "command",
            False,
            f"`kb` means {commands[0]} here, not {ours}",
            f"call {ours}, or put its folder first on PATH",
        )
    try:
        clash = version("kb-manager")
    except PackageNotFoundError:
        return HealthCheck("command", True, f"`kb` is {ours}")
    return HealthCheck(
        "command",
        False,
        f"kb-manager {clash} is installed beside kb and owns the same command",
        "keep one of them in this environment",
    )


def check_import_name() -> HealthCheck:
    """Check that PYTHONPATH has no package `kb`, which everything except the console script would import instead."""
    ours = Path(__file__).resolve().parent
    for part in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for candidate in (Path(part) / "kb", Path(part) / "kb.py"):
            if candidate.exists() and candidate.resolve() != ours:
                return HealthCheck(
                    "import",
                    False,
                    f"PYTHONPATH has another `kb`: {candidate}",
                    "remove its folder from PYTHONPATH when you use kb",
                )
    return HealthCheck("import", True, f"`import kb` is {ours}")


def check_leftovers() -> HealthCheck:
    """Check for temporary directories that no process owns any more, as after a power cut."""
    left = scratch.abandoned()
    if not left:
        return HealthCheck("leftovers", True, "none")
    return HealthCheck(
        "leftovers",
        False,
        f"{len(left)} directories of earlier runs: {left[0]} ...",
        "the next `kb verify` or `kb check` removes them",
    )


def check_torch(python: Path, *, is_named: bool) -> HealthCheck:
    """Check that the interpreter for probes can import torch. Only probes need it; a service or laptop may lack it."""
    if not shutil.which(str(python)):
        return HealthCheck(
            "torch", False, f"{python} is not an interpreter", "--python takes the path of a Python interpreter"
        )
    result = subprocesses.run([str(python), "-c", "import torch; print(torch.__version__)"], TORCH_S)
    if result.exit_code == 0:
        return HealthCheck("torch", True, f"{result.stdout.strip()} in {python}")
    how = f"--python /path/to/your/training/env/bin/python, or {install_command('probes')}"
    reason = result.failure or (result.stderr.strip().splitlines() or ["no message"])[-1]
    if "No module named 'torch'" in reason and not is_named:
        text = f"not installed in {python}: `kb verify` needs it, search, diagnosis and the service do not"
        return HealthCheck("torch", True, text, f"to verify: {how}")
    return HealthCheck("torch", False, f"{python}: {reason}", how)
