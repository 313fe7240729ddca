"""The bare wheel, installed without extras in a fresh environment outside the checkout, does its job."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.support.console import CHECKOUT
from tests.support.wheel import UvTool

FOLDERS = {
    "kb/api": "api",
    "kb/cli": "cli",
    "kb/entries": "entries",
    "kb/probes": "probes",
    "kb/verified": "docs/verified",
    "kb": "kb",
}  # in the wheel: in the checkout


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


@pytest.mark.parametrize(("package", "folder"), FOLDERS.items())
def test_it_holds_every_file_of_the_checkout(wheel: Path, package: str, folder: str) -> None:
    """Templates, pictures and migrations too, which no import would miss."""
    listed = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", folder], capture_output=True, text=True, cwd=CHECKOUT, check=True
    )
    wanted = {f"{package}{name.removeprefix(folder)}" for name in listed.stdout.split()}
    assert wanted
    assert wanted <= set(ZipFile(wheel).namelist())


OTHERS = re.compile(r"\.dist-info/|\.data/data/share/man/man1/kb\.1$")


def test_it_holds_nothing_else_but_the_index(wheel: Path) -> None:
    """An entry that was removed is not installed because an earlier build of the checkout had it."""

    def in_checkout(name: str) -> Path:
        package = next(package for package in FOLDERS if name.startswith(f"{package}/"))
        return CHECKOUT / FOLDERS[package] / name.removeprefix(f"{package}/")

    names = [name for name in ZipFile(wheel).namelist() if not OTHERS.search(name)]
    index = [name for name in names if name.startswith("kb/search/built_in_index/")]
    assert index
    assert [name for name in names if name not in index and not in_checkout(name).is_file()] == []


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
    code, report, _ = run(installed, "verify", "backward-second-time", "--python", sys.executable)
    assert (code, report["verdict"]) == (0, "verified")


def test_it_lints(installed: Path) -> None:
    code, document, _ = run(installed, "lint")
    assert code == 0, document


def test_serve_says_how_to_install_what_it_needs(installed: Path, wheel: Path) -> None:
    ended = subprocess.run([installed / "kb", "serve"], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert f"{installed / 'python'} -m pip install '{wheel}[server]'" in ended.stderr


@pytest.mark.slow
def test_what_it_says_works_as_printed(wheel: Path, uv_tool: UvTool) -> None:
    uv_tool.install("--python", sys.executable, wheel)
    refused = uv_tool.kb("mcp")
    assert refused.code == 2
    uv_tool.follow(refused.err.partition("hint:")[2])
    assert uv_tool.kb("mcp").code == 0


def test_doctor_still_runs_beside_a_folder_of_our_name_on_pythonpath(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "kb").mkdir()
    code, document, _ = run(installed, "doctor", PYTHONPATH=str(tmp_path))
    findings = {finding["subject"]: finding for finding in document["findings"]}  # type: ignore[attr-defined]  # JSON
    assert code == 1
    assert not findings["import"]["is_fine"]
    assert findings["torch"]["is_fine"], "only probes need it"
    assert "--python" in findings["torch"]["mend"]
