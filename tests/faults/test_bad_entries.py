"""Entry files that cannot be read: named with file, line and rule; everything else goes on working."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kb.content.catalog import Catalog, load_catalog
from kb.content.parser import read_entry
from kb.content.roots import Root, root_at
from kb.lint import linter
from kb.patterns.syntax import parse
from tests.support.console import BREAKS, ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")


def broken_yaml(path: Path) -> None:
    path.write_text(path.read_text().replace("tags: [test]", "tags: [test"))


def duplicate_key(path: Path) -> None:
    path.write_text(path.read_text().replace("severity: low", "severity: low\nseverity: high"))


def invalid_utf8(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n\xff\xfe\n")


def ten_megabytes(path: Path) -> None:
    path.write_text(path.read_text() + "x" * (10 << 20))


def other_id(path: Path) -> None:
    path.write_text(path.read_text().replace("id: broken-", "id: another-"))


def alias_bomb(path: Path) -> None:
    path.write_text(path.read_text().replace("tags: [test]", "tags: &a [test]\naliases: [*a, *a]", 1))


def nested_front_matter(path: Path) -> None:
    path.write_text(path.read_text().replace("tags: [test]", f"tags: {'[' * 30_000}"))


def nested_front_matter_in_blocks(path: Path) -> None:
    path.write_text(path.read_text().replace("tags: [test]", f"tags:\n  {'- ' * 30_000}x"))


BROKEN: list[tuple[Callable[[Path], None], str]] = [
    (broken_yaml, "yaml"),
    (duplicate_key, "duplicate-key"),
    (invalid_utf8, "not-utf8"),
    (ten_megabytes, "too-large"),
    (other_id, "id-is-not-file-name"),
    (alias_bomb, "yaml"),
    (nested_front_matter, "yaml"),
    (nested_front_matter_in_blocks, "yaml"),
]


def test_broken_entries_are_named_and_cost_nobody_else(kb: Kb, content: ContentRoot) -> None:
    broken = [(content.entry(f"broken-{number}"), damage, rule) for number, (damage, rule) in enumerate(BROKEN)]
    content.incident("sound", body="if not is_fixed:\n    raise RuntimeError('the thing broke: code 7')\n")
    for path, damage, _ in broken:
        damage(path)

    linted = kb("lint", "--json")
    assert linted.code == 1
    named = {(finding["rule"], finding["file"]) for finding in linted.json["findings"]}
    searched = kb("search", "thing called sound", "--json")
    assert searched.code == 0
    assert searched.json["hits"][0]["id"] == "sound"

    for path, damage, rule in broken:
        assert (rule, str(path)) in named, damage
        assert any(path.name in problem and rule in problem for problem in searched.json["problems"]), damage
        shown = kb("show", path.stem, "--json")
        assert (shown.code, shown.json["error"]["type"]) == (2, "content-error"), damage
        assert rule in shown.json["error"]["message"], damage

    assert kb("verify", "sound", "--json").json["verdict"] == "verified"


def test_an_unknown_id_is_answered_with_the_nearest_ones(kb: Kb) -> None:
    for command in ("show", "verify"):
        ended = kb(command, "checkpoint-save-timeout", "--json")
        assert ended.code == 2
        assert ended.json["ok"] is False
        assert ended.json["error"]["type"] == "unknown-entry"
        assert "checkpoint-save-allgather-timeout" in ended.json["error"]["hint"]
    assert kb("show", "oom_mask").err.splitlines()[1].startswith("hint:  nearest: oom-masked-as-nccl-timeout")


def test_two_entries_of_one_id_are_a_finding_and_replaces_is_the_way(kb: Kb, content: ContentRoot) -> None:
    taken = "checkpoint-save-allgather-timeout"
    content.incident(taken)
    assert "duplicate-id" in kb("lint").out
    assert kb("show", taken, "--json").json["origin"] == "built-in"

    content.entry(taken, extra=f"replaces: {taken}\n")
    shown = kb("show", taken, "--json").json
    assert shown["origin"] == str(content.path)
    assert kb("verify", taken, "--json").json["verdict"] == "verified"


def test_a_signature_that_could_hang_is_a_finding_and_hangs_neither_search_nor_verify(
    kb: Kb, content: ContentRoot
) -> None:
    content.incident("evil", f"print('{'a' * 60}!')\n" + BREAKS)
    path = content.path / "entries" / "evil.md"
    evil = "signatures:\n  - pattern: '(a+)+b'\n    role: root\n    source: a test\n    sample: 'aaab'\n"
    path.write_text(path.read_text().replace("signatures:\n", evil))
    assert any(item["rule"] == "ambiguous-repeat" for item in kb("lint", "--json").json["findings"])
    assert kb("search", "the thing broke: code 7 " + "a" * 60 + "!", "--json").json["hits"][0]["id"] == "evil"
    assert kb("verify", "evil", "--json").json["verdict"] == "verified"


def test_an_entry_that_a_service_reads_changes_no_warnings_of_its_other_threads(
    content: ContentRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FastAPI prepares a route with a warning silenced; made an error meanwhile, it would end the request with 500."""
    result = list[Any]()

    def observed(pattern: str) -> Any:
        result.append(list(warnings.filters))
        return parse(pattern)

    path = content.entry("read-there")
    monkeypatch.setattr("kb.content.entry.parse", observed)
    before = list(warnings.filters)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(read_entry, path, "somewhere").result()
    assert result
    assert all(item == before for item in result)


def test_an_entry_that_vanishes_while_it_is_checked_costs_nobody_else(
    content: ContentRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    content.entry("gone", has_probe=False)
    content.entry("sound", has_probe=False)

    def load_and_delete(roots: tuple[Root, ...]) -> Catalog:
        catalog = load_catalog(roots)
        (content.path / "entries" / "gone.md").unlink()
        return catalog

    monkeypatch.setattr(linter, "load_catalog", load_and_delete)
    assert {violation.path.stem for violation in linter.lint((root_at(content.path),)).violations} <= {"sound"}
