"""`kb test` reports each kind of mismatch between signatures and logs, with file and line."""

from __future__ import annotations

from pathlib import Path

import pytest

from kb.authoring import signature_tests
from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root, root_at
from tests.support.console import ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")

BUILT_IN = (builtin_root(),)


def rewrite(path: Path, old: str, new: str) -> int:
    """Replace a text of a file; the line where it stands."""
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return text[: text.index(old)].count("\n") + 1


def violations(content: ContentRoot) -> list[tuple[str, str, int]]:
    """File, rule and line of each mismatch in a team's root."""
    roots = (root_at(content.path),)
    mismatches = signature_tests.mismatches(load_catalog(roots), signature_tests.healthy_logs(roots))
    return [(violation.path.name, violation.rule, violation.line) for violation in mismatches]


def test_the_built_in_entries_match_their_logs_and_nothing_else() -> None:
    catalog = load_catalog(BUILT_IN)
    assert list(signature_tests.mismatches(catalog, signature_tests.healthy_logs(BUILT_IN))) == []
    assert all(len(entry.logs) >= 2 and entry.look_alikes for entry in catalog)


def test_a_sound_root_of_a_team_is_clean(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound")
    document = kb("test", "--json").json
    assert document["findings"] == []
    assert document["counts"]["entries"] > 1


def test_an_entry_that_cannot_be_read_is_counted(kb: Kb, content: ContentRoot) -> None:
    content.incident("sound")
    (content.path / "entries" / "broken.md").write_text("no front matter")
    ended = kb("test")
    assert ended.code == 1
    assert "left out: " in ended.err and ended.out.rstrip().endswith(": 1 left out")


def test_a_log_that_nothing_matches_is_found(content: ContentRoot) -> None:
    line = rewrite(content.entry("sound"), "[rank3]: the thing broke: code 43", "[rank3]: it broke")
    assert violations(content) == [("sound.md", "log-not-matched", line)]


def test_one_log_of_three_may_be_a_matter_of_context(content: ContentRoot) -> None:
    path = content.entry("sound")
    more = "  - pattern: 'progress \\d+'\n    role: context\n    source: a test\n    sample: 'progress 3'\n"
    rewrite(path, "references:", more + "references:")
    rewrite(path, "```log\n[rank3]", "```log\nprogress 7\n```\n\n```log\n[rank3]")
    assert violations(content) == []
    rewrite(path, "progress 7", "nothing")
    assert [rule for _, rule, _ in violations(content)] == ["log-not-matched"]


def test_a_look_alike_that_matches_is_found(content: ContentRoot) -> None:
    line = rewrite(content.entry("sound"), "another thing broke", "just before:\nthe thing broke")
    assert violations(content) == [("sound.md", "look-alike-matched", line + 1)]


@pytest.mark.parametrize("role, count", [("root", 1), ("cascade", 1), ("context", 0)])
def test_a_healthy_log_of_the_team_must_not_match(content: ContentRoot, role: str, count: int) -> None:
    path = content.entry("sound")
    more = f"  - pattern: 'epoch \\d+ done'\n    role: {role}\n    source: a test\n    sample: 'epoch 3 done'\n"
    rewrite(path, "references:", more + "references:")
    (content.path / "entries" / "healthy").mkdir()
    (content.path / "entries" / "healthy" / "ddp.log").write_text("epoch 1\nepoch 1 done\n")
    assert [rule for _, rule, _ in violations(content)] == ["healthy-log-matched"] * count


def test_a_log_of_raw_bytes_is_read(content: ContentRoot) -> None:
    content.entry("sound")
    (content.path / "entries" / "healthy").mkdir()
    (content.path / "entries" / "healthy" / "raw.log").write_bytes(bytes(range(256)) * 100)
    assert violations(content) == []
