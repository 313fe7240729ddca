"""Fixtures: a home for each test, `kb` in this process or in a separate one, and a content root to fill."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import groupby, islice
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from kb.content import parser, roots
from kb.search.fingerprints import recipe
from kb.search.generation import BUILT_IN, BUILT_IN_SEGMENT
from kb.search.index_update import IndexedSegment
from tests.support.console import ContentRoot, Kb, run_kb
from tests.support.in_process import run_kb_here
from tests.support.wheel import UvTool, build_wheel, install_wheel

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background; children would inherit this
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A slow machine is not a failure, and every run tries the same examples.
settings.register_profile("kb", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kb")

# An entry is immutable and depends only on these arguments, so each is parsed once for all tests of a process.
parser.parse_entry = cache(parser.parse_entry)

REMOVED = (
    "KB_ROOTS",
    "KB_DEBUG",
    "KB_REPORT_URL",
    "KB_API_KEY",
    "KB_DATABASE_URL",
    "RANK",
    "SLURM_PROCID",
    "PYTHONPATH",
    "FORCE_COLOR",
)
FEW = ("checkpoint-save-allgather-timeout", "oom-masked-as-nccl-timeout", "address-in-use")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """The number of workers: three more than cores, since tests of deadlines and stalling clients mostly wait."""
    return min(len(os.sched_getaffinity(0)), 4) + 3


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that is made by the first process that needs it and shared by all."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, is_made = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not is_made.exists():
            make(folder)  # in its final place, because a Python environment cannot be moved
            is_made.touch()
    return folder


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests so that each worker begins with files of slow tests and ends with quick ones for others to steal.

    `--dist worksteal` gives each worker an equal part of the list, in its order, and idle workers steal from the end.
    """
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers == 1:
        return
    files = [list(group) for _, group in groupby(items, lambda item: item.path)]
    slow = [file for file in files if any(item.get_closest_marker("slow") for item in file)]
    quick = (item for file in files if file not in slow for item in file)
    ordered: list[pytest.Item] = []
    for number in range(workers):
        size = (len(items) - len(ordered)) // (workers - number)
        part = [item for file in slow[number::workers] for item in file]
        ordered += [*part, *islice(quick, max(0, size - len(part)))]
    items[:] = [*ordered, *quick]


@pytest.fixture(scope="session")
def built_in_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the index of the built-in entries, for reading.

    It uses the segment that comes with an installation, and builds it again if the code has changed: otherwise every
    index of these tests would take seconds.
    """

    def build(folder: Path) -> None:
        if not IndexedSegment.load(BUILT_IN_SEGMENT, BUILT_IN, recipe()):
            subprocess.run([sys.executable, "-m", "kb.search.built_in_index"], stdout=subprocess.DEVNULL, check=True)
        assert run_kb("index", cwd=folder.parent, XDG_CACHE_HOME=str(folder), KB_ROOTS="").code == 0

    return made_once(tmp_path_factory, "built-in-index", build)


@pytest.fixture(scope="session")
def uv_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The download cache of uv."""
    return made_once(tmp_path_factory, "uv-cache", Path.mkdir)


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory, uv_cache: Path) -> Path:
    """The wheel of this checkout."""
    folder = made_once(tmp_path_factory, "wheel", partial(build_wheel, cache=uv_cache))
    (path,) = folder.glob("gpu_kb-*.whl")
    return path


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory, uv_cache: Path, wheel: Path) -> Path:
    """The `bin` folder of an environment with the wheel and its base dependencies."""
    return made_once(tmp_path_factory, "installed", partial(install_wheel, cache=uv_cache, wheel=wheel)) / "bin"


@pytest.fixture
def uv_tool(tmp_path: Path, uv_cache: Path) -> UvTool:
    """`uv tool` with a separate installation for each test."""
    return UvTool(tmp_path, uv_cache)


@pytest.fixture(autouse=True)
def home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, built_in_index: Path
) -> Iterator[Path]:
    """A home for this test, so that the user's own cache and data stay untouched.

    Its index shares the files of the built-in one. A test that damages them uses `own_index`.
    """
    path = Path(tempfile.mkdtemp(prefix="home-", dir=tmp_path_factory.getbasetemp()))
    shutil.copytree(built_in_index, path / "cache", copy_function=os.link)
    for name in REMOVED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(path / "data"))
    monkeypatch.setenv("TMPDIR", str(path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    (path / "tmp").mkdir()
    monkeypatch.setenv("NO_COLOR", "1")
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def own_index(home: Path, built_in_index: Path) -> None:
    """Give this test its own copy of the files of the index."""
    shutil.rmtree(home / "cache")
    shutil.copytree(built_in_index, home / "cache")


@pytest.fixture
def few_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the built-in root to three entries in this process, so that indexing and linting are quick."""
    built_in = roots.builtin_root()
    root = roots.Root(built_in.name, tmp_path / "few" / "entries", tmp_path / "few" / "probes", built_in.verified)
    root.entries.mkdir(parents=True)
    root.probes.mkdir()
    for entry in FEW:
        shutil.copy(built_in.entries / f"{entry}.md", root.entries)
        probe = f"{entry.replace('-', '_')}.py"
        shutil.copy(built_in.probes / probe, root.probes)
    monkeypatch.setattr(roots, "builtin_root", lambda: root)


@pytest.fixture
def kb(tmp_path: Path) -> Kb:
    """Run `kb` in this process, from a directory that is not the checkout."""
    return partial(run_kb_here, cwd=tmp_path)


@pytest.fixture
def kb_process(tmp_path: Path) -> Kb:
    """Run the installed `kb` in a separate process, for tests about processes, streams and the interpreter."""
    return partial(run_kb, cwd=tmp_path)


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContentRoot:
    """An empty content root, known to every `kb` that this test starts."""
    root = ContentRoot(tmp_path / "content")
    monkeypatch.setenv("KB_ROOTS", str(root.path))
    return root
