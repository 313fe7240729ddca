"""Hints about extras install kb from where it came: it is on no package index."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from kb.installation import install_command, installer, source
from tests.support.console import CHECKOUT

GIT = {"url": "https://git.example.org/kb.git", "vcs_info": {"vcs": "git", "commit_id": "1f" * 20}}


@pytest.mark.parametrize(
    ("origin", "arguments"),
    [
        ({"url": "file:///team/kb", "dir_info": {}}, ["/team/kb[server]"]),
        ({"url": "file:///my%20kb", "dir_info": {"editable": True}}, ["-e", "/my kb[server]"]),
        ({"url": "file:///d/gpu_kb-1-py3-none-any.whl", "archive_info": {}}, ["/d/gpu_kb-1-py3-none-any.whl[server]"]),
        ({}, ["CHECKOUT_OR_WHEEL[server]"]),
    ],
)
def test_a_path_is_named_with_the_extra(origin: dict[str, Any], arguments: list[str]) -> None:
    assert shlex.split(source(origin, "server")) == arguments


@pytest.mark.parametrize(
    ("origin", "url"),
    [
        (GIT, "git+https://git.example.org/kb.git"),
        ({**GIT, "vcs_info": {**GIT["vcs_info"], "requested_revision": "v2"}}, "git+https://git.example.org/kb.git@v2"),  # type: ignore[dict-item]  # JSON
        ({"url": "https://example.org/gpu_kb.whl", "archive_info": {}}, "https://example.org/gpu_kb.whl"),
    ],
)
def test_what_came_from_elsewhere_is_a_requirement_with_its_url(origin: dict[str, Any], url: str) -> None:
    (argument,) = shlex.split(source(origin, "server"))
    requirement = Requirement(argument)
    assert (requirement.name, requirement.extras, requirement.url) == ("gpu-kb", {"server"}, url)


@pytest.mark.parametrize(
    ("mark", "command"), [("uv-receipt.toml", "uv tool install"), ("pipx_metadata.json", "pipx install --force")]
)
def test_tools_install_into_their_own_environments(tmp_path: Path, mark: str, command: str) -> None:
    (tmp_path / mark).touch()
    assert installer(tmp_path) == command


def test_this_checkout_is_named_by_its_path() -> None:
    assert shlex.split(install_command("probes"))[-1] == f"{CHECKOUT}[probes]"
