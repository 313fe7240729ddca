"""`kb test`: each kind of log that breaks a signature is found, in the file and line where it stands."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.authoring import signature_tests
from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from tests.support.console import ContentRoot, Kb

BUILT_IN = (builtin_root(),)


def rewrite(path: Path, old: str, new: str) -> int:
    """Replace a text of a file; the line where it stands."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def findings(kb: Kb, content: ContentRoot) -> list[tuple[str, str, int]]:
    """Those in the team's own files."""
    found = [(Path(one["file"]), one["rule"], one["line"]) for one in kb("test", "--json").json["findings"]]
    return [(path.name, rule, line) for path, rule, line in found if path.is_relative_to(content.path)]


def test_the_built_in_entries_match_their_logs_and_nothing_else() -> None:
    found = load_catalog(BUILT_IN)
    assert list(signature_tests.mismatches(found, signature_tests.healthy_logs(BUILT_IN))) == []
    assert all(len(entry.logs) >= 2 and entry.look_alikes for entry in found)


def test_a_sound_root_of_a_team_is_clean(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound")
    assert findings(kb, content) == []
    assert kb("test", "--json").json["counts"]["entries"] > 1


def test_a_log_that_nothing_matches_is_found(kb: Kb, content: ContentRoot) -> None:
    line = rewrite(content.entry("sound"), "[rank3]: the thing broke: code 43", "[rank3]: it broke")
    assert findings(kb, content) == [("sound.md", "log-not-matched", line)]


def test_one_log_of_three_may_be_a_matter_of_context(kb: Kb, content: ContentRoot) -> None:
    path = content.entry("sound")
    more = "  - pattern: 'progress \\d+'\n    role: context\n    source: a test\n    sample: 'progress 3'\n"
    rewrite(path, "references:", more + "references:")
    rewrite(path, "```log\n[rank3]", "```log\nprogress 7\n```\n\n```log\n[rank3]")
    assert findings(kb, content) == []
    rewrite(path, "progress 7", "nothing")
    assert [rule for _, rule, _ in findings(kb, content)] == ["log-not-matched"]


def test_a_look_alike_that_matches_is_found(kb: Kb, content: ContentRoot) -> None:
    line = rewrite(content.entry("sound"), "another thing broke", "just before:\nthe thing broke")
    assert findings(kb, content) == [("sound.md", "look-alike-matched", line + 1)]


@pytest.mark.parametrize("role, count", [("root", 1), ("cascade", 1), ("context", 0)])
def test_a_healthy_log_of_the_team_must_not_match(kb: Kb, content: ContentRoot, role: str, count: int) -> None:
    path = content.entry("sound")
    more = f"  - pattern: 'epoch \\d+ done'\n    role: {role}\n    source: a test\n    sample: 'epoch 3 done'\n"
    rewrite(path, "references:", more + "references:")
    (content.path / "entries" / "healthy").mkdir()
    (content.path / "entries" / "healthy" / "ddp.log").write_text("epoch 1\nepoch 1 done\n")
    assert [rule for _, rule, _ in findings(kb, content)] == ["healthy-log-matched"] * count


def test_a_log_of_raw_bytes_is_read(kb: Kb, content: ContentRoot) -> None:
    content.entry("sound")
    (content.path / "entries" / "healthy").mkdir()
    (content.path / "entries" / "healthy" / "raw.log").write_bytes(bytes(range(256)) * 100)
    assert findings(kb, content) == []
