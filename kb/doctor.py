"""Checks of kb itself: index, store, names that clash, the interpreter for probes, leftovers of earlier runs."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kb.content.roots import Root
from kb.errors import KbError
from kb.harness import subprocesses
from kb.search import index

OLD_S = 120.0  # an arm's directory nobody works in for this long was left behind
TORCH_S = 120.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `mend` says what to do when it is not fine, and is empty when it is."""

    subject: str
    is_fine: bool
    message: str
    mend: str = ""


def examine(roots: tuple[Root, ...], python: Path) -> Iterator[Finding]:
    """All findings, cheap ones first."""
    yield content(roots)
    yield search_index(roots)
    yield store()
    if where := os.environ.get("KB_DATABASE_URL"):
        yield database(where)
    yield command_name()
    yield import_name()
    yield left_directories()
    yield torch_in(python)


def content(roots: tuple[Root, ...]) -> Finding:
    count = sum(len(root.entry_files()) for root in roots)
    names = ", ".join(root.name for root in roots)
    if count:
        return Finding("content", True, f"{count} entry files in {names}")
    return Finding(
        "content", False, f"no entry files in {names}", "install kb again, or set KB_ROOTS to a content root"
    )


def search_index(roots: tuple[Root, ...]) -> Finding:
    """Is the index there, fresh and readable? Anything else mends itself at the next search, if it can be written."""
    home = index.home(roots)
    opened = index.open_if_fresh(roots)
    if opened:
        with opened:
            count, problems = len(opened), len(opened.problems)
        if problems:
            return Finding("index", False, f"{problems} entries were left out of it", "`kb lint` says why")
        return Finding("index", True, f"{count} entries, fresh, in {home}")
    existing = next(parent for parent in (home, *home.parents) if parent.exists())
    if not os.access(existing, os.W_OK):
        return Finding(
            "index",
            False,
            f"{home} cannot be written: every search builds the index in memory",
            "set XDG_CACHE_HOME to a writable directory",
        )
    if (home / "current.json").exists():
        return Finding(
            "index", False, f"the index in {home} is stale or cannot be read", "`kb index --force` builds it again"
        )
    return Finding("index", True, "not built yet: the first search does it")


def store() -> Finding:
    from kb.store import reports
    from kb.store.database import Database

    try:
        with Database.open() as database:
            reports.save(database, [])
            return Finding("store", True, f"writable, {database.name}")
    except KbError as error:
        return Finding("store", False, error.message, error.hint)


def database(where: str) -> Finding:
    """What a service keeps things in. Nothing is begun here: the service could not write to a file of another user."""
    from kb.store import reports
    from kb.store.database import Database

    try:
        with Database.open(where) as opened:
            with opened.reading() as session:
                is_begun = session is not None
            if not is_begun:
                hint = "`kb key new` begins it, as the user of the service; or is KB_DATABASE_URL wrong?"
                return Finding("database", False, f"nothing was ever kept in {opened.name}", hint)
            reports.save(opened, [])
            return Finding("database", True, f"writable, {opened.name}")
    except KbError as error:
        return Finding("database", False, error.message, error.hint)


def command_name() -> Finding:
    """Another `kb` on PATH, or the package kb-manager, which installs a command of this name."""
    ours = Path(sys.argv[0]).resolve()
    found = [Path(part) / "kb" for part in os.get_exec_path() if (Path(part) / "kb").is_file()]
    others = [path for path in found if path.resolve() != ours] if ours.name == "kb" else []
    if others and (not found or found[0].resolve() != ours):
        return Finding(
            "command", False, f"`kb` means {found[0]} here, not {ours}", f"call {ours}, or put its folder first on PATH"
        )
    try:
        clash = version("kb-manager")
    except PackageNotFoundError:
        return Finding("command", True, f"`kb` is {ours}")
    return Finding(
        "command",
        False,
        f"kb-manager {clash} is installed beside kb and owns the same command",
        "keep one of them in this environment",
    )


def import_name() -> Finding:
    """A package `kb` on PYTHONPATH would be imported instead of ours by anything but the console script."""
    ours = Path(__file__).resolve().parent
    for part in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        for candidate in (Path(part) / "kb", Path(part) / "kb.py"):
            if candidate.exists() and candidate.resolve() != ours:
                return Finding(
                    "import",
                    False,
                    f"PYTHONPATH has another `kb`: {candidate}",
                    "take its folder off PYTHONPATH when you use kb",
                )
    return Finding("import", True, f"`import kb` is {ours}")


def left_directories() -> Finding:
    """Directories of arms that nobody works in any more, as after a power cut."""
    busy = (
        {target for pid in os.listdir("/proc") if pid.isdigit() and (target := _cwd(pid))}
        if Path("/proc").is_dir()
        else set()
    )
    left = [
        path
        for path in Path(tempfile.gettempdir()).glob("kb-arm-*")
        if str(path) not in busy and _age(path) > OLD_S and os.access(path, os.W_OK)
    ]
    if not left:
        return Finding("leftovers", True, "none")
    return Finding(
        "leftovers",
        False,
        f"{len(left)} directories of earlier arms: {left[0]} ...",
        f"rm -r {left[0].parent}/kb-arm-*",
    )


def torch_in(python: Path) -> Finding:
    """Does the interpreter for probes import torch?"""
    if not shutil.which(str(python)):
        return Finding(
            "torch", False, f"{python} is not an interpreter", "--python takes the path of a Python interpreter"
        )
    seen = subprocesses.run([str(python), "-c", "import torch; print(torch.__version__)"], TORCH_S)
    if seen.exit_code == 0:
        return Finding("torch", True, f"{seen.stdout.strip()} in {python}")
    said = seen.failure or (seen.stderr.strip().splitlines() or ["no message"])[-1]
    return Finding(
        "torch",
        False,
        f"{python}: {said}",
        "pip install 'gpu-kb[probes]', or --python /path/to/your/training/env/bin/python",
    )


def _cwd(pid: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return ""


def _age(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0.0
