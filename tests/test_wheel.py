"""The bare wheel, installed without extras in a fresh environment outside the checkout, does its job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.console import CHECKOUT

INSTALL_S = 900


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel."""
    home = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--wheel-dir", str(home), str(CHECKOUT)]
    subprocess.run(wheel, check=True, timeout=INSTALL_S, cwd=home)
    (path,) = home.glob("gpu_kb-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that has the wheel and its base dependencies, nothing else."""
    home = tmp_path_factory.mktemp("wheel")
    venv.create(home / "env", with_pip=True)
    bin_folder = home / "env" / "bin"
    install: list[str | Path] = [
        bin_folder / "python",
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]
    constraints = CHECKOUT / "constraints.txt"
    subprocess.run([*install, "-c", constraints, built], check=True, timeout=INSTALL_S, cwd=home)
    return bin_folder


def run(installed: Path, *args: str | Path, **env: str) -> tuple[int, dict[str, object], str]:
    """(exit code, document, stderr) of the installed `kb`."""
    ended = subprocess.run(
        [installed / "kb", *args, "--json"],
        capture_output=True,
        text=True,
        cwd=installed.parent,
        env={**os.environ, **env},
        timeout=180,
    )
    return ended.returncode, json.loads(ended.stdout), ended.stderr


@pytest.mark.parametrize(
    ("folder", "package"),
    [("api", "kb/api"), ("kb", "kb"), ("cli", "kb/cli"), ("entries", "kb/entries"), ("probes", "kb/probes")],
)
def test_it_holds_every_file_of_the_checkout(built: Path, folder: str, package: str) -> None:
    """Templates, pictures and migrations too, which no import would miss."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", folder], capture_output=True, text=True, cwd=CHECKOUT, check=True
    )
    wanted = {f"{package}/{name.partition('/')[2]}" for name in listed.stdout.split()}
    assert wanted
    assert wanted <= set(ZipFile(built).namelist())


def test_it_searches_offline_and_without_torch(installed: Path) -> None:
    code, document, errors = run(installed, "search", "ALLGATHER timeout save")
    assert code == 0, errors
    hits = document["hits"]
    assert isinstance(hits, list)
    assert hits[0]["id"] == "checkpoint-save-allgather-timeout"
    assert hits[0]["origin"] == "built-in"


def test_its_first_search_indexes_nothing(installed: Path, tmp_path: Path) -> None:
    code, _, errors = run(installed, "search", "ALLGATHER timeout save", XDG_CACHE_HOME=str(tmp_path))
    assert (code, errors) == (0, "")
    (tables,) = tmp_path.glob("kb/index/*/generation-*/tables.json")
    (segment,) = json.loads(tables.read_text())["segments"]
    assert segment["path"] == "built-in"
    assert segment["dead"] == []
    assert not list(tmp_path.glob("kb/index/*/segment-*"))


def test_verify_names_the_missing_package_and_the_way_to_another_interpreter(installed: Path) -> None:
    code, report, _ = run(installed, "verify", "checkpoint-save-allgather-timeout")
    assert code == 4
    assert report["verdict"] == "not-applicable"
    assert f"torch is not installed in {installed / 'python'}" in str(report["reason"])
    assert "--python /path/to/your/training/env/bin/python" in str(report["next_step"])


def test_verify_borrows_an_interpreter_that_has_torch(installed: Path) -> None:
    code, report, _ = run(installed, "verify", "connection-reset-by-peer", "--python", sys.executable)
    assert (code, report["verdict"]) == (0, "verified")


def test_serve_names_the_extra_that_it_needs(installed: Path) -> None:
    code, document, _ = run(installed, "lint")
    assert code == 0, document
    ended = subprocess.run([installed / "kb", "serve"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "gpu-kb[server]" in ended.stderr


def test_doctor_still_runs_beside_a_folder_of_our_name_on_pythonpath(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    code, document, _ = run(installed, "doctor", PYTHONPATH=str(tmp_path))
    findings = {finding["subject"]: finding for finding in document["findings"]}  # type: ignore[attr-defined]  # JSON
    assert code == 1
    assert not findings["import"]["is_fine"]
    assert not findings["torch"]["is_fine"]
    assert "--python" in findings["torch"]["mend"]
