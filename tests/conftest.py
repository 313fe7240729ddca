"""Fixtures: a home of the test's own, the installed command, a content root to fill."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.console import ContentRoot, Kb, run_kb

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # started in the background: children would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


# A slow machine is no failure, and everybody tries the same examples.
settings.register_profile("kb", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kb")


@pytest.fixture(scope="session")
def built_in_index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that holds the index of the built-in entries: building it takes seconds, once for all tests."""
    cache = tmp_path_factory.mktemp("cache")
    assert run_kb("index", cwd=cache, XDG_CACHE_HOME=str(cache), KB_ROOTS="").code == 0
    return cache


@pytest.fixture(autouse=True)
def home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, built_in_index: Path
) -> Iterator[Path]:
    """A home of this test's own: cache and data of the person who runs the tests stay untouched."""
    path = tmp_path_factory.mktemp("home")
    shutil.copytree(built_in_index, path / "cache")
    for name in (
        "KB_ROOTS",
        "KB_DEBUG",
        "KB_REPORT_URL",
        "KB_API_KEY",
        "KB_DATABASE_URL",
        "RANK",
        "SLURM_PROCID",
        "PYTHONPATH",
        "FORCE_COLOR",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(path / "data"))
    monkeypatch.setenv("TMPDIR", str(path / "tmp"))
    (path / "tmp").mkdir()
    monkeypatch.setenv("NO_COLOR", "1")
    yield path
    shutil.rmtree(path / "cache", ignore_errors=True)  # 5 MB of each of thousands of tests


@pytest.fixture
def kb(tmp_path: Path) -> Kb:
    """Run the installed `kb` from a directory that is not the checkout."""
    return partial(run_kb, cwd=tmp_path)


@pytest.fixture
def content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ContentRoot:
    """An empty content root, known to every `kb` this test starts."""
    root = ContentRoot(tmp_path / "content")
    monkeypatch.setenv("KB_ROOTS", str(root.path))
    return root
