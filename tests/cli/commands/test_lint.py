"""`kb lint` as a contributor meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.console import ContentRoot, Kb, arm_directories

pytestmark = pytest.mark.usefixtures("few_entries")

WRONG = "no mark says how this is known: 'It is fragile.'"


def unmarked(content: ContentRoot) -> Path:
    """An entry with a claim that has no mark."""
    content.probe("fragile")
    path = content.entry("fragile")
    path.write_text(
        path.read_text().replace("## Fix\n", "It is fragile.\n\n## Fix\n").replace("It says so.", "It says.")
    )
    path.write_text(path.read_text().replace("## Why it works\n", "It is fragile.\n\n## Why it works\n"))
    return path


def line_of(path: Path, text: str, after: str) -> int:
    lines = path.read_text().splitlines()
    return lines.index(text, lines.index(after)) + 1


def test_a_finding_is_one_line_with_file_line_rule_and_message(kb: Kb, content: ContentRoot) -> None:
    path = unmarked(content)
    ended = kb("lint", path)
    line = line_of(path, "It is fragile.", after="## Fix")
    assert ended.code == 1
    assert ended.out.splitlines()[0] == f"content/entries/fragile.md:{line}: unmarked-claim: {WRONG}"
    assert ended.err == ""


def test_a_file_outside_the_working_directory_is_named_in_full(
    kb: Kb, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = unmarked(ContentRoot(tmp_path_factory.mktemp("elsewhere") / "team"))
    assert kb("lint", path).out.startswith(f"{path}:")


def test_json_carries_the_same_findings_and_the_counts(kb: Kb, content: ContentRoot) -> None:
    path = unmarked(content)
    result = kb("lint", path, "--json")
    assert result.code == 1
    assert result.json["schema"] == "kb.lint.v1"
    assert result.json["ok"] is True
    (finding,) = result.json["findings"]
    line = line_of(path, "It is fragile.", after="## Fix")
    assert finding == {"file": str(path), "line": line, "rule": "unmarked-claim", "message": WRONG}
    counts = result.json["counts"]
    assert (counts["entries"], counts["probes"], counts["findings"]) == (1, 1, 1)
    assert counts["rules"] >= 31


def test_a_clean_entry_is_said_in_one_line(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound")
    ended = kb("lint", content.path / "entries" / "sound.md")
    assert ended.code == 0
    assert ended.out.startswith("1 entry, 1 probe, ")
    assert ended.out.endswith(" rules: clean\n")


def test_without_paths_every_root_is_checked(kb: Kb, tmp_path: Path) -> None:
    content = ContentRoot(tmp_path / "team")
    unmarked(content)
    everything = kb("lint", "--json", "--root", content.path).json
    assert everything["counts"]["entries"] == 4
    assert WRONG in [finding["message"] for finding in everything["findings"]]
    built_in = kb("lint", "--json").json
    assert built_in["counts"]["entries"] == everything["counts"]["entries"] - 1


def test_an_entry_of_a_root_that_is_not_configured_brings_its_root_along(kb: Kb, tmp_path: Path) -> None:
    content = ContentRoot(tmp_path / "team")
    content.incident("sound")
    content.incident("other")
    content.entry("sound", extra="causes: [other]\n")
    assert kb("lint", "team/entries/sound.md").code == 0


def test_a_probe_is_loaded_in_a_process_of_its_own_and_leaves_nothing(
    kb: Kb, content: ContentRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kb.verify.plan.DESCRIBE_S", 3.0)
    content.raw_probe("exits", "import os\nos._exit(0)\n")
    content.raw_probe("endless", "while True: pass\n")
    ended = kb("lint", *sorted((content.path / "entries").iterdir()))
    assert ended.code == 1
    assert "content/probes/exits.py:1: broken-probe: it cannot be loaded: its process ended" in ended.out
    assert "content/probes/endless.py:1: broken-probe: it cannot be loaded: it did not end in time" in ended.out
    assert not arm_directories()


def test_the_schema_is_a_json_schema_that_forbids_unknown_keys(kb: Kb) -> None:
    ended = kb("lint", "--schema")
    assert ended.code == 0
    schema = json.loads(ended.out)
    assert schema["additionalProperties"] is False
    assert {"id", "signatures", "references", "reviewed"} <= set(schema["properties"])


@pytest.mark.parametrize(
    "path", ["missing.md", "content/entries/missing.md", "content/probes/sound.py", "content", "notes.md"]
)
def test_what_is_no_entry_file_is_bad_input(kb: Kb, content: ContentRoot, tmp_path: Path, path: str) -> None:
    content.incident("sound")
    (tmp_path / "notes.md").write_text("# notes\n")
    ended = kb("lint", path, "--json")
    assert ended.code == 2
    assert ended.json["error"]["type"] == "usage-error"
    assert "is not an entry file" in ended.json["error"]["message"]
