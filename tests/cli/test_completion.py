"""What bash offers at Tab, by the script that kb gives it."""

from __future__ import annotations

import os
import shlex
import subprocess
from functools import cache

import pytest

from kb.content.area import Area
from kb.content.roots import builtin_root
from tests.support.console import GENEROUS_S, KB, ContentRoot

IDS = [path.stem for path in builtin_root().entry_files()]
TYPE = """
{script}
COMP_WORDS=({words}) COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p kb | sed 's/.*-F \\([^ ]*\\).*/\\1/') kb
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@cache
def script() -> str:
    """What a person puts into .bashrc: `source <(_KB_COMPLETE=source_bash kb)`."""
    env = {**os.environ, "_KB_COMPLETE": "source_bash"}
    return subprocess.run([KB], capture_output=True, text=True, timeout=GENEROUS_S, env=env, check=True).stdout


def offered(*words: str) -> list[str]:
    """What completes the last of these words."""
    ended = subprocess.run(
        ["bash", "--norc", "-c", TYPE.format(script=script(), words=" ".join(map(shlex.quote, ["kb", *words])))],
        capture_output=True,
        text=True,
        timeout=GENEROUS_S,
        env={**os.environ, "PATH": f"{KB.parent}:{os.environ['PATH']}"},
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.split()


@pytest.mark.parametrize("command", ["show", "graph", "history", "verify"])
def test_ids(command: str) -> None:
    assert offered(command, "oom-") == [entry_id for entry_id in IDS if entry_id.startswith("oom-")]


def test_ids_of_private_entries(content: ContentRoot, tmp_path: os.PathLike[str]) -> None:
    content.entry("zirconium-broke")
    assert offered("show", "zirc") == ["zirconium-broke"]
    other = ContentRoot(content.path / "other")
    other.entry("zirconium-melts")
    assert offered("show", "--root", str(other.path), "zirc") == ["zirconium-broke", "zirconium-melts"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["sea"], ["search"]),
        (["search", "hang", "--tag", "fsd"], ["fsdp"]),
        (["search", "hang", "--framework", "acc"], ["accelerate"]),
        (["list", "--area", ""], sorted(Area)),
        (["list", "--status", "con"], ["confirmed"]),
        (["show", "oom-logits", "--section", "f"], ["fix"]),
        (["show", "oom-logits", "--lang", ""], ["en", "zh"]),
        (["key", "new", "laptop", "--scope", "r"], ["read", "report"]),
        (["show", "--no-p"], ["--no-pager"]),
        (["diagnose", ""], []),  # bash then offers files
    ],
)
def test_values(words: list[str], expected: list[str]) -> None:
    assert offered(*words) == expected


def test_a_root_that_is_gone_offers_nothing_and_no_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KB_ROOTS", "/does/not/exist")
    assert offered("show", "oom-") == []


def test_no_index_is_built(monkeypatch: pytest.MonkeyPatch, tmp_path: os.PathLike[str]) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", f"{tmp_path}/cache")
    assert offered("search", "hang", "--tag", "fsdp")
    assert not os.path.exists(f"{tmp_path}/cache")
