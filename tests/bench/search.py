"""A search as a whole process: compared with its indispensable imports, after installation, and after an edit."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from tests.bench import generated
from tests.bench.measured import Cost, run

KB = str(Path(sys.executable).with_name("kb"))
FLOOR = [sys.executable, "-c", "import typer, whoosh.index"]
SEARCH = [KB, "search", "ALLGATHER timeout save"]
ROUNDS = 21
ENTRIES = 1000
EDITS = 5


def measure() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as name, _compiled(Path(name)):
        yield f'| `kb search "{SEARCH[-1]}"` | measured | bar |'
        yield "|---|---|---|"
        yield from _plain(Path(name))
        yield from _first(Path(name))
        yield from _thousand(Path(name))


@contextmanager
def _compiled(directory: Path) -> Iterator[None]:
    """Compile the modules of both sides once, as pip does, regardless of the environment, and use no private root."""
    before = dict(os.environ)
    for name in ("PYTHONDONTWRITEBYTECODE", "KB_ROOTS"):
        os.environ.pop(name, None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(directory / "compiled")
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _plain(directory: Path) -> Iterator[str]:
    _use_cache(directory / "plain")
    run(SEARCH, directory)
    run(FLOOR, directory)
    searches, floor = [], []
    for _ in range(ROUNDS):  # interleaved, so that both see the same noise
        floor.append(run(FLOOR, directory))
        searches.append(run(SEARCH, directory))
    ratio = _cpu_s(searches) / _cpu_s(floor)
    yield f"| CPU time relative to `import typer, whoosh.index`, medians of {ROUNDS} | {ratio:.2f} times | 1.4 times |"
    yield f"| CPU time | {_cpu_s(searches):.3f} s | |"
    yield f"| peak memory | {max(cost.peak_mib for cost in searches):.0f} MiB | 60 MiB |"


def _first(directory: Path) -> Iterator[str]:
    """The row for a search with an empty cache, as after an installation."""
    plain, first = [], []
    for number in range(EDITS):
        _use_cache(directory / "plain")
        plain.append(run(SEARCH, directory))
        _use_cache(directory / f"empty-{number}")
        first.append(run(SEARCH, directory))
    yield f"| first search after installation, CPU time relative to a later one | {_cpu_s(first) / _cpu_s(plain):.2f} times | 2 times |"


def _thousand(directory: Path) -> Iterator[str]:
    root = generated.generate(directory / "root", ENTRIES)
    os.environ["KB_ROOTS"] = str(root.entries.parent)
    _use_cache(directory / "thousand")
    run([*FLOOR], directory)
    bulk = run([KB, "index"], directory)
    run(SEARCH, directory)
    plain, edited = [], []
    for path in root.entry_files()[:EDITS]:
        plain.append(run(SEARCH, directory))
        path.write_text(path.read_text(encoding="utf-8").replace("## Fix", "An edit.\n\n## Fix"), encoding="utf-8")
        edited.append(run(SEARCH, directory))
    added = median(cost.wall_s for cost in edited) - median(cost.wall_s for cost in plain)
    ratio = _cpu_s(edited) / _cpu_s(plain)
    yield f"| with {ENTRIES:,} private entries: indexing all of them | {bulk.wall_s:.1f} s | 8 s |"
    yield f"| the same: a search after an edit of one, relative to a later one | {ratio:.2f} times, {added:+.2f} s | +0.5 s |"


def _use_cache(path: Path) -> None:
    os.environ["XDG_CACHE_HOME"] = str(path)


def _cpu_s(costs: list[Cost]) -> float:
    """The median CPU seconds. Raises `AssertionError` if a run failed."""
    assert all(cost.code == 0 for cost in costs)
    return median(cost.cpu_s for cost in costs)
