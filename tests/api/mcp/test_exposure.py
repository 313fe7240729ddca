"""What versions are exposed to, and what the process of the service does not have in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest

from kb.content.catalog import load_catalog
from kb.content.roots import root_at
from tests.support.console import ContentRoot

RUNNERS = (
    "kb.harness.launcher",
    "kb.harness.forkserver_client",
    "kb.verify.plan",
    "kb.verify.checks",
    "kb.verify.runner",
)
LINE = "GPU arms: verified on 2 x NVIDIA H100 80GB HBM3, driver 570, torch 2.7.1 (2026-03-01)"

judge: Callable[..., Any] = resolve_name("kb.api.mcp.exposure:judge")


@pytest.fixture
def entries(tmp_path: Path) -> Any:
    """Two that name versions, one that names none."""
    content = ContentRoot(tmp_path / "team")
    content.entry("old-torch", extra='applies_to: {torch: "<2.5"}\n')
    content.entry("new-peft", extra='applies_to: {peft: ">=0.11"}\nfixed_in: {peft: ">=0.13"}\n')
    content.entry("any-time")
    return load_catalog([root_at(content.path)]).current()


@pytest.mark.parametrize(
    ("packages", "states"),
    [
        ({"torch": "2.4.1", "peft": "0.12"}, ["new-peft applies", "old-torch applies"]),
        ({"torch": "2.6", "peft": "0.13"}, ["new-peft does-not-apply", "old-torch does-not-apply"]),
        ({"torch": "2.4.1"}, ["old-torch applies", "new-peft unknown"]),
        ({"torch": "2.6", "peft": None}, ["new-peft unknown", "old-torch does-not-apply"]),
        ({}, ["new-peft unknown", "old-torch unknown"]),
    ],
)
def test_what_applies_comes_first(entries: Any, packages: dict[str, str | None], states: list[str]) -> None:
    result = judge(entries, packages)
    assert [f"{incident.id} {incident.state}" for incident in result.incidents] == states
    assert result.any_version == ("any-time",)
    assert all(incident.reason for incident in result.incidents)


def test_a_proof_counts_on_the_stated_gpu_alone(entries: Any) -> None:
    hardware = {"old-torch": LINE, "new-peft": ""}
    proved = {incident.id: incident.proved for incident in judge(entries, {}, "h100", hardware).incidents}
    assert proved == {"old-torch": LINE, "new-peft": None}
    for gpu in ("A100", ""):
        assert {incident.proved for incident in judge(entries, {}, gpu, hardware).incidents} == {None}


@pytest.fixture(scope="module")
def loaded() -> tuple[set[str], set[str]]:
    """The modules of a service when it starts, and when somebody asks it over MCP."""
    code = """
import json, sys
import kb.api.app
started = list(sys.modules)
import kb.api.mcp.server
print(json.dumps([started, list(sys.modules)]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    started, asked = json.loads(ended.stdout)
    return set(started), set(asked)


def test_a_service_that_nobody_asks_over_mcp_does_not_load_it(loaded: tuple[set[str], set[str]]) -> None:
    started, asked = loaded
    assert "mcp" in asked - started


def test_a_service_has_nothing_in_it_that_could_run_a_probe(loaded: tuple[set[str], set[str]]) -> None:
    assert not loaded[1] & set(RUNNERS)
