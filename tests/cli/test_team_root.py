"""A team with a content root of its own: from `kb new` to a verified entry beside the built-in ones."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kb.content.roots import BUILT_IN
from tests.support.console import BREAKS, ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")

TITLE = "The thing called loader-stalls-on-nfs"
REPLACED = "checkpoint-save-allgather-timeout"


@pytest.fixture
def team(tmp_path: Path, kb: Kb, monkeypatch: pytest.MonkeyPatch) -> ContentRoot:
    """What `kb new` makes, finished by the template that every test entry is made of."""
    home = tmp_path / "team"
    assert kb("new", "loader-stalls-on-nfs", "--root", home).code == 0
    monkeypatch.setenv("KB_ROOTS", str(home))
    return ContentRoot(home)


def test_a_new_incident_is_named_line_by_line_until_it_is_finished(team: ContentRoot, kb: Kb) -> None:
    entry = team.path / "entries" / "loader-stalls-on-nfs.md"
    assert "TODO" in entry.read_text()
    findings = kb("lint", entry, "--json").json["findings"]
    assert {finding["rule"] for finding in findings} == {"unfinished", "unfinished-probe"}, (
        "and nothing else to stumble over"
    )
    todo = [number for number, line in enumerate(entry.read_text().splitlines(), 1) if "TODO" in line]
    assert [finding["line"] for finding in findings if finding["rule"] == "unfinished"] == todo
    assert kb("verify", "loader-stalls-on-nfs").code == 1, "an unfinished probe verifies nothing"
    team.incident("loader-stalls-on-nfs")
    assert kb("lint", entry, "--json").json["findings"] == []


def test_a_finished_incident_answers_everywhere_with_its_origin(team: ContentRoot, kb: Kb) -> None:
    team.incident("loader-stalls-on-nfs")
    origin = str(team.path)
    (hit, *_) = kb("search", "the thing broke: code 99", "--json").json["hits"]
    assert (hit["id"], hit["origin"]) == ("loader-stalls-on-nfs", origin)
    assert kb("show", "loader-stalls-on-nfs", "--json").json["origin"] == origin
    assert "loader-stalls-on-nfs" in [item["id"] for item in kb("list", "--json").json["entries"]]
    assert kb("verify", "loader-stalls-on-nfs", "--json").json["verdict"] == "verified"
    assert kb("graph", "loader-stalls-on-nfs").code == 0


def test_a_built_in_entry_is_replaced_in_every_answer(team: ContentRoot, kb: Kb) -> None:
    team.incident("loader-stalls-on-nfs")
    team.entry(REPLACED, extra=f"replaces: {REPLACED}\n", title="How we save here")
    team.probe(REPLACED, BREAKS)
    shown = kb("show", REPLACED, "--json").json
    assert (shown["title"], shown["origin"]) == ("How we save here", str(team.path))
    ended = kb("verify", REPLACED, "--json")
    assert ended.json["arms"]["control"]["because"] == "it is broken", "the team's probe runs, not the built-in one"
    listed = [item for item in kb("list", "--json").json["entries"] if item["id"] == REPLACED]
    assert [item["origin"] for item in listed] == [str(team.path)]


def test_the_same_id_without_replaces_is_a_finding_and_the_built_in_entry_stays(team: ContentRoot, kb: Kb) -> None:
    team.incident(REPLACED)
    assert kb("show", REPLACED, "--json").json["origin"] == BUILT_IN
    rules = {item["rule"] for item in kb("lint", "--json").json["findings"] if str(team.path) in item["file"]}
    assert "duplicate-id" in rules


def test_new_overwrites_nothing_and_refuses_what_is_no_id(team: ContentRoot, kb: Kb) -> None:
    again = kb("new", "loader-stalls-on-nfs", "--json")
    assert (again.code, "already exists" in again.json["error"]["message"]) == (2, True)
    for wrong in ("Loader", "../outside", "a_b", "-x-", ""):
        assert kb("new", "--root", team.path, "--", wrong).code == 2
    assert sorted(path.name for path in team.path.rglob("*.*")) == [
        "loader-stalls-on-nfs.md",
        "loader_stalls_on_nfs.py",
    ]


def test_new_without_a_root_asks_for_one(kb: Kb) -> None:
    ended = kb("new", "something")
    assert ended.code == 2
    assert "--root" in ended.err


def test_the_graph_shows_both_directions_and_ends_in_a_circle(team: ContentRoot, kb: Kb) -> None:
    team.entry("first", extra="causes: [second]\nmasked_by: [loud]\n")
    team.entry("second", extra="causes: [first]\n")
    team.entry("loud")
    around = kb("graph", "first", "--json").json
    named = {key: [item["id"] for item in around[key]] for key in ("causes", "caused_by", "masked_by", "masks")}
    assert named == {"causes": ["second"], "caused_by": ["second"], "masked_by": ["loud"], "masks": []}
    assert [item["id"] for item in kb("graph", "loud", "--json").json["masks"]] == ["first"]
    tree = kb("graph", "first").out
    assert len(re.findall("second", tree)) == 4, tree
    assert kb("graph", "frist").code == 2


@pytest.mark.parametrize(("languages", "is_translated"), [("", False), ('["en"]', False), ('["en", "zh"]', True)])
def test_a_new_incident_is_written_in_the_languages_of_its_root(
    tmp_path: Path, kb: Kb, languages: str, is_translated: bool
) -> None:
    home = tmp_path / "other"
    (home / "entries").mkdir(parents=True)
    if languages:
        (home / "entries" / "root.toml").write_text(f"languages = {languages}\n")
    assert kb("new", "loader-stalls-on-nfs", "--root", home).code == 0
    entry = home / "entries" / "loader-stalls-on-nfs.md"
    assert ("中文" in entry.read_text(), "title_zh" in entry.read_text()) == (is_translated, is_translated)
    findings = kb("lint", entry, "--json").json["findings"]
    assert {finding["rule"] for finding in findings} == {"unfinished", "unfinished-probe"}


def test_an_english_entry_answers_in_english_where_chinese_is_asked_for(team: ContentRoot, kb: Kb) -> None:
    team.incident("loader-stalls-on-nfs")
    entry = team.path / "entries" / "loader-stalls-on-nfs.md"
    english = entry.read_text().replace("title_zh: 测试条目\n", "").replace(", 测试]", "]").partition("## 中文")[0]
    entry.write_text(english)
    assert kb("lint", entry).code == 0
    assert kb("show", "loader-stalls-on-nfs", "--json").json["title_zh"] == TITLE
    shown = kb("show", "loader-stalls-on-nfs", "--lang", "zh")
    assert (shown.code, "Do not break it." in shown.out) == (0, True)
    (hit, *_) = kb("search", "the thing broke: code 99 卡住", "--json").json["hits"]
    assert (hit["id"], hit["title_zh"]) == ("loader-stalls-on-nfs", TITLE)


def test_what_an_answer_hints_at_knows_the_root_that_it_was_given(
    kb: Kb, content: ContentRoot, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KB_ROOTS")
    home = content.path.rename(tmp_path / "our team")
    ContentRoot(home).incident("loader-stalls-on-nfs")
    (tmp_path / "train.log").write_text("RuntimeError: the thing broke: code 7\n")
    for command in (
        ["search", "the thing broke: code 7", "--limit", "1"],
        ["diagnose", "train.log"],
        ["show", "loader-stalls-on-nfs"],
        ["verify", "loader-stalls-on-nfs"],
    ):
        out = kb(*command, "--root", "our team").out
        hints = re.findall(r"kb (?:show|verify) loader-stalls-on-nfs[^`\n]*", out)
        assert hints, out
        for hint in hints:
            assert kb(*shlex.split(hint)[1:]).code == 0, hint


def test_the_commands_that_follow_a_new_incident_can_be_pasted(kb: Kb, tmp_path: Path) -> None:
    out = kb("new", "loader-stalls-on-nfs", "--root", tmp_path / "our team").out
    ContentRoot(tmp_path / "our team").incident("loader-stalls-on-nfs")
    commands = [line for line in out.splitlines() if line.startswith("  kb ")]
    assert [kb(*shlex.split(command)[1:]).code for command in commands] == [0, 0], out


def test_a_root_that_is_not_there_yet_is_made_by_what_the_error_hints_at(
    kb: Kb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KB_ROOTS", str(tmp_path / "our team"))
    error = kb("list", "--json").json["error"]
    (command,) = re.findall(r"`(kb new .+)`", error["hint"])
    assert kb(*shlex.split(command.replace("ID", "loader-stalls-on-nfs"))[1:]).code == 0
    assert kb("list").code == 0
