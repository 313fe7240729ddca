"""Probes run in interpreters older and newer than ours, without anything installed there; kb itself in newer ones."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.console import Kb
from tests.support.wheel import UvTool

pytestmark = pytest.mark.slow

VERSIONS = ("3.9", "3.10", "3.12", "3.13", "3.14")


def interpreters() -> list[Path]:
    """What this machine has of them: on PATH, or side by side as pyenv keeps them."""
    result = []
    for version in VERSIONS:
        homes = [Path("/usr/bin"), Path("/usr/local/bin")]
        homes += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin"))
        result += [home / f"python{version}" for home in homes if (home / f"python{version}").is_file()]
    return result


INTERPRETERS = interpreters()
NEWER = [path for path in INTERPRETERS if path.name not in ("python3.9", "python3.10")]


@pytest.mark.skipif(not INTERPRETERS, reason="no Python but ours is on this machine")
@pytest.mark.parametrize("python", INTERPRETERS, ids=lambda path: path.name)
def test_a_probe_without_torch_is_verified_there(kb: Kb, python: Path) -> None:
    version = subprocess.run(
        [python, "-c", "import sys; print(sys.version.split()[0])"], capture_output=True, text=True
    )
    ended = kb("verify", "batch-size-invariant", "--json", "--python", python)
    assert ended.json["verdict"] == "verified", ended.json["reason"]
    assert ended.json["environment"]["python"]["version"] == version.stdout.strip()


@pytest.mark.skipif(not INTERPRETERS, reason="no Python but ours is on this machine")
@pytest.mark.parametrize("python", INTERPRETERS, ids=lambda path: path.name)
def test_every_probe_file_loads_there(kb: Kb, python: Path) -> None:
    plans = kb("verify", "--all", "--plan", "--json", "--python", python).json["plans"]
    assert {plan["id"]: plan["fault"] for plan in plans if plan["fault"]} == {}


@pytest.mark.skipif(not NEWER, reason="no newer Python than ours is on this machine")
@pytest.mark.parametrize("python", NEWER, ids=lambda path: path.name)
def test_kb_runs_there_without_a_warning(uv_tool: UvTool, wheel: Path, python: Path) -> None:
    """Every warning is an error. uv has compiled nothing, so Python reads the sources of Whoosh here."""
    uv_tool.install("--python", python, wheel)
    strict = {"PYTHONWARNINGS": "error"}
    ended = uv_tool.kb("search", "ALLGATHER timeout save", "--json", **strict)
    assert ended.err == ""
    assert ended.json["hits"][0]["id"] == "checkpoint-save-allgather-timeout"
    ended = uv_tool.kb("diagnose", "-", "--json", stdin="RuntimeError: Address already in use\n", **strict)
    assert ended.json["findings"][0]["id"] == "address-in-use"
    ended = uv_tool.kb("verify", "batch-size-invariant", "--json", **strict)
    assert ended.json["verdict"] == "verified", ended.json["reason"]
