"""The documentation names what there is: commands, verdicts, errors, variables, decisions."""

from __future__ import annotations

import re
import shlex
from importlib import import_module
from pathlib import Path

import pytest

from kb import errors
from kb.content.roots import GROUP, VARIABLE
from kb.verify.verdict import EXIT_CODES, Verdict
from tests.support.console import CHECKOUT, ContentRoot, Kb

README = (CHECKOUT / "README.md").read_text(encoding="utf-8")
COMMANDS = import_module("kb.cli.main").COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_in_the_readme(command: str) -> None:
    assert f"\nkb {command} " in README or f"\nkb {command}\n" in README


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_stands_beside_its_exit_code(verdict: Verdict) -> None:
    (row,) = [line for line in README.splitlines() if line.startswith(f"| {EXIT_CODES[verdict]} |")]
    assert f"`{verdict.value}`" in row


def test_every_error_is_drawn_in_the_tree_with_its_exit_code() -> None:
    drawn = dict(re.findall(r"(\w+) +(\d+) ", errors.__doc__ or ""))
    real = {
        name: str(kind.exit_code)
        for name, kind in vars(errors).items()
        if isinstance(kind, type) and issubclass(kind, errors.KbError)
    }
    assert real.items() <= drawn.items()


@pytest.mark.parametrize("name", [VARIABLE, GROUP])
def test_ways_to_add_content_are_in_the_readme(name: str) -> None:
    assert name in README


def test_every_decision_is_listed() -> None:
    listed = (CHECKOUT / "docs" / "decisions" / "README.md").read_text(encoding="utf-8")
    for path in (CHECKOUT / "docs" / "decisions").glob("0*.md"):
        assert path.name in listed


def shown(command: str) -> str:
    """What the README shows under a command."""
    return README.partition(f"$ {command}\n")[2].partition("\n$ ")[0].partition("\n```")[0].strip()


@pytest.mark.parametrize("command", ["kb diagnose train.log", 'kb search "ALLGATHER timeout save" --limit 1'])
def test_the_shown_transcript_is_what_kb_prints(kb: Kb, tmp_path: Path, command: str) -> None:
    """Line by line, but for a verification: its seconds differ from run to run."""
    (tmp_path / "train.log").write_text(shown("cat train.log") + "\n")
    assert shown(command) == kb(*shlex.split(command)[1:], COLUMNS="100").out.strip()


@pytest.mark.usefixtures("few_entries")
def test_contributing_followed_to_the_letter_adds_an_incident(kb: Kb, content: ContentRoot) -> None:
    """Two files in a root of one's own: linted clean, found by its words, verified."""
    content.incident("thing-breaks")
    findings = kb("lint", "--json").json["findings"]
    assert [finding for finding in findings if finding["file"].startswith(str(content.path))] == []
    assert kb("search", "the thing broke: code 99", "--json").json["hits"][0]["id"] == "thing-breaks"
    assert kb("verify", "thing-breaks", "--json").json["verdict"] == "verified"
