"""Every rule of `kb lint`: a text that breaks it, at its line, and a similar one that does not."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from kb.content.entry import FrontMatter
from kb.content.languages import Language
from kb.content.parser import parse_entry
from kb.content.roots import root_at
from kb.errors import ContentError, UsageError
from kb.lint import records
from kb.lint.linter import READING_RULES, Result, check_entry, check_glossary, check_probe, lint, rules, slow_patterns
from kb.lint.rule import ProbeFile, Violation
from tests.support.console import CHECKOUT, ContentRoot
from tests.support.lint_examples import (
    ENTRY_FILE,
    EXAMPLES,
    GLOSSARIES,
    SOUND,
    TELL,
    Edits,
    Example,
    edited,
    entry_file,
)

NAMES = [f"{number}-{example.rule}" for number, example in enumerate(EXAMPLES)]


def violations_in(text: str, languages: frozenset[Language] = frozenset(Language)) -> list[Violation]:
    """The violations in the text of an entry, without any file."""
    try:
        file = entry_file(text, languages)
    except ContentError as error:
        return [Violation(error.path, error.line, error.rule, error.detail)]
    slow = slow_patterns([file.entry], limit_s=0.2) if len(file.meta.signatures) > 1 else frozenset()
    return list(check_entry(replace(file, slow=slow)))


def test_the_sound_entry_is_clean() -> None:
    assert violations_in(SOUND) == []


@pytest.mark.parametrize("example", EXAMPLES, ids=NAMES)
def test_a_bad_entry_breaks_one_rule_in_its_line(example: Example) -> None:
    text = edited(example.bad)
    violations = violations_in(text)
    assert {violation.rule for violation in violations} == {example.rule}
    assert any(example.at in text.splitlines()[violation.line - 1] for violation in violations), violations


@pytest.mark.parametrize("good", [example.good for example in EXAMPLES], ids=NAMES)
def test_a_similar_good_entry_is_clean(good: Edits) -> None:
    assert violations_in(edited(good)) == []


@pytest.mark.parametrize("rule", GLOSSARIES)
def test_a_bad_glossary_breaks_one_rule_in_its_line(rule: str, tmp_path: Path) -> None:
    bad, line, good = GLOSSARIES[rule]
    path = tmp_path / "glossary.toml"
    path.write_text(bad, encoding="utf-8")
    assert [(violation.path, violation.rule, violation.line) for violation in check_glossary(path)] == [
        (path, rule, line)
    ]
    path.write_text(good, encoding="utf-8")
    assert list(check_glossary(path)) == []


@pytest.mark.parametrize("source", [b"groups = [[1, 2]]", b"groups = [[]]", b"words = []", b"groups = [", b"\xff"])
def test_an_unreadable_glossary_is_a_violation(source: bytes, tmp_path: Path) -> None:
    path = tmp_path / "glossary.toml"
    path.write_bytes(source)
    assert [violation.rule for violation in check_glossary(path)] == ["unreadable-glossary"]


TRIAGE = """\
[[observation]]
ask = "Is it so?"
ask_zh = "是吗？"
command = "true"
where = "here"
where_zh = "在这里"
outcome = [{seen = "yes", seen_zh = "是", points_to = ["sound"]}, {seen = "no", seen_zh = "否", points_to = ["%s"]}]
"""

# What only files can break: rule to the file that is flagged, in the root that `broken_root` writes.
FILES = {
    "too-large": "entries/large.md",
    "unreadable": "entries/unreadable.md",
    "not-utf8": "entries/latin.md",
    "duplicate-id": "entries/taken.md",
    "replaces-nothing": "entries/replacement.md",
    "root-declaration": "entries/root.toml",
    "missing-probe": "entries/no-probe.md",
    "broken-probe": "probes/broken.py",
    "orphan-probe": "probes/orphan.py",
    "probe-import": "probes/imports.py",
    "unfinished-probe": "probes/begun.py",
    "unseen-gpu-arms": "probes/claims.py",
    "own-words": "probes/talks.py",
    "torchrun-address": "probes/launches.py",
    "unreadable-triage": "entries/triage/crash.toml",
    "triage": "entries/triage/hang.toml",
}


def broken_root(content: ContentRoot) -> None:
    """One entry or probe for each rule in `FILES`, and sound ones beside them."""
    content.incident("sound")
    content.incident("taken")
    content.incident("talks", body='raise RuntimeError("the thing broke: code 7")')
    content.incident("large")
    with content.entry("large").open("a") as file:
        file.write("x" * (1 << 20))
    content.incident("latin")
    with content.entry("latin").open("ab") as file:
        file.write("größe".encode("latin-1"))
    content.probe("unreadable")
    (content.path / "entries" / "unreadable.md").symlink_to("/proc/self/mem")
    content.incident("replacement")
    content.entry("replacement", extra="replaces: replacement\n")
    content.entry("no-probe")
    (content.path / "entries" / "root.toml").write_text('languages = ["en", "fr"]')
    (content.path / "entries" / "triage").mkdir()
    (content.path / "entries" / "triage" / "crash.toml").write_text("[[observation]]\nask = 'why?'\n")
    (content.path / "entries" / "triage" / "hang.toml").write_text(TRIAGE % "no-such-entry")
    (content.path / "entries" / "triage" / "slow.toml").write_text(TRIAGE % "talks")
    content.raw_probe("broken", "from kb.probe import Probe\n\nprobe = Probe()\n")
    content.probe("orphan")
    content.incident("begun", body="pass  # TODO")
    content.incident("launches", body='run("torchrun", "--standalone")')
    content.incident("launches-here", body='run("torchrun", "--standalone", "--local-addr=localhost")')
    content.incident("claims", body="pass  # one.on_gpus()")
    content.incident("imports")
    path = content.path / "probes" / "imports.py"
    path.write_text("if True:\n    import typer\n" + path.read_text())


@pytest.fixture(scope="module")
def linted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    earlier = ContentRoot(tmp_path_factory.mktemp("earlier") / "base")
    earlier.incident("taken")
    content = ContentRoot(tmp_path_factory.mktemp("content") / "team")
    broken_root(content)
    return content.path, lint((root_at(earlier.path), root_at(content.path)))


CHINESE_TEXTS = {"title_zh: 测试条目\n": "", ", 测试]": "]"}
ENGLISH_ALIAS = {"made for a test, ": ""}


@pytest.mark.parametrize(
    ("languages", "missing", "rules"),
    [
        ({Language.ENGLISH}, CHINESE_TEXTS, set()),
        ({Language.CHINESE}, ENGLISH_ALIAS, set()),
        ({Language.ENGLISH}, ENGLISH_ALIAS, {"aliases"}),
        (set(Language), CHINESE_TEXTS, {"aliases", "chinese-text", "headings"}),
    ],
)
def test_an_entry_is_written_in_the_languages_that_its_root_declares(
    languages: set[Language], missing: dict[str, str], rules: set[str]
) -> None:
    text = edited(missing).partition("## 中文")[0]
    assert {violation.rule for violation in violations_in(text, frozenset(languages))} == rules


@pytest.mark.parametrize(
    "declaration", ["languages = []", "languages = 'en'", "language = ['en']", "languages = [['en']]", "languages = ["]
)
def test_an_invalid_declaration_is_a_violation_and_the_root_counts_as_english(tmp_path: Path, declaration: str) -> None:
    content = ContentRoot(tmp_path)
    content.incident("sound")
    (tmp_path / "entries" / "root.toml").write_text(declaration)
    (violation,) = lint((root_at(tmp_path),)).violations
    assert (violation.rule, violation.path.name) == ("root-declaration", "root.toml")


@pytest.mark.parametrize(
    ("edits", "problems"),
    [
        ({"status: confirmed": "status: done", "severity: low": "severity: bad"}, ["front-matter", "front-matter"]),
        ({"tags: [test]": "tags: [test"}, ["yaml"]),
        ({"tags: [test]": "tags: [test]\ntags: [twice]"}, ["duplicate-key"]),
    ],
)
def test_an_entry_with_invalid_front_matter_shows_its_other_violations_too(
    content: ContentRoot, edits: dict[str, str], problems: list[str]
) -> None:
    content.incident("example")
    path = content.path / "entries" / "example.md"
    path.write_text(edited({**edits, TELL: "TODO [nothing 1]", "```log look-alike": "```text"}), encoding="utf-8")
    rules = [violation.rule for violation in lint((root_at(content.path),), frozenset({path})).violations]
    assert sorted(rules) == sorted([*problems, "unfinished", "unknown-mark", "no-look-alike"])


@pytest.mark.parametrize("rule, file", FILES.items(), ids=FILES)
def test_a_bad_file_breaks_one_rule(linted: tuple[Path, Result], rule: str, file: str) -> None:
    home, result = linted
    assert [violation.rule for violation in result.violations if violation.path == home / file] == [rule]


def test_sound_files_beside_broken_ones_are_clean(linted: tuple[Path, Result]) -> None:
    home, result = linted
    flagged = {
        str(violation.path.relative_to(home)) for violation in result.violations if violation.path.is_relative_to(home)
    }
    assert flagged == set(FILES.values())


def test_every_fault_of_a_probe_is_a_violation(tmp_path: Path) -> None:
    content = ContentRoot(tmp_path / "team")
    content.incident("faulty", probe='make(completed(), backend="gloo", world_size=1, name="plain")')
    content.incident("doubtful", probe='make(raised(""))')
    content.incident("crashing", probe="1 / 0")
    result = lint((root_at(content.path),))
    messages = {(violation.path.stem, violation.message) for violation in result.violations}
    assert ("doubtful", "plain: control expects a pattern that matches the empty string") in messages
    assert ("crashing", "it cannot be loaded: ZeroDivisionError: division by zero") in messages
    assert {violation.rule for violation in result.violations} == {"broken-probe"}


IMPORTS = """\
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    import yaml
try:
    from torch import nn
except ImportError:
    nn = None
"""


def test_only_module_level_imports_are_restricted() -> None:
    source = IMPORTS + "\n\ndef train():\n    import torch\n    import kb.lint\n"
    (violation,) = check_probe(ProbeFile(Path("imports.py"), source, "imports", ()))
    assert (violation.rule, violation.line) == ("probe-import", 5)


def test_only_the_given_entries_and_their_probes_are_checked(tmp_path: Path) -> None:
    content = ContentRoot(tmp_path / "team")
    broken_root(content)
    (content.path / "entries" / "root.toml").unlink()
    given = content.path / "entries" / "imports.md"
    result = lint((root_at(content.path),), frozenset({given}))
    assert [(violation.rule, violation.path.name) for violation in result.violations] == [
        ("probe-import", "imports.py")
    ]
    assert (result.entries, result.probes) == (1, 1)


def test_an_entry_that_another_replaces_cannot_be_checked_alone(tmp_path: Path) -> None:
    first, second = ContentRoot(tmp_path / "first"), ContentRoot(tmp_path / "second")
    first.incident("same")
    second.incident("same")
    second.entry("same", extra="replaces: same\n")
    roots = (root_at(first.path), root_at(second.path))
    assert lint(roots).violations == ()
    with pytest.raises(UsageError, match="another root replaces it"):
        lint(roots, frozenset({first.path / "entries" / "same.md"}))


def test_every_rule_has_a_failing_example_and_every_example_a_rule() -> None:
    assert {example.rule for example in EXAMPLES} | set(FILES) | set(GLOSSARIES) | {
        *(rule.__name__.replace("_", "-") for rule in records.RULES),
    } == set(rules())


def test_every_rule_has_its_requirement_in_one_sentence() -> None:
    for name, requirement in rules().items():
        assert re.fullmatch(r"[^\n]{16,}\.", requirement), name


def test_every_rule_of_the_parser_is_listed() -> None:
    trees = [ast.parse(path.read_text()) for path in (CHECKOUT / "kb" / "content").glob("*.py")]
    calls = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]
    raised = {ast.literal_eval(call.args[2]) for call in calls if ast.unparse(call.func) == "ContentError"}
    assert raised == set(READING_RULES)


def test_the_schema_allows_the_fields_of_the_sound_entry_only() -> None:
    schema = FrontMatter.model_json_schema()
    assert schema["additionalProperties"] is False
    assert set(parse_entry(SOUND.encode(), ENTRY_FILE, "").meta.model_fields_set) <= set(schema["properties"])
