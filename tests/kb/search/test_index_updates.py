"""The index after changes of entries: it answers as one that is built anew, and indexes only what has changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from whoosh.filedb.filestore import Storage

from kb.content import roots as content_roots
from kb.content.roots import Root, configured_roots
from kb.search import built_in_index, fingerprints, generation, index_cache, index_update, index_workers, index_writer
from kb.search.index import Index
from kb.search.index_cache import open_if_fresh, open_index
from kb.search.ranking import search
from tests.support.console import ContentRoot

QUESTIONS = (
    "ALLGATHER timeout save",
    "the thing broke: code 7",
    "zirconium",
    "zirconum broke",
    "保存检查点 超时",
    "address in use",
)


@pytest.fixture(autouse=True)
def installation(few_entries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installation of three entries with their segment, and an empty cache; returns the segment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(generation, "BUILT_IN_SEGMENT", tmp_path / "built-in")
    built_in_index.build(tmp_path / "built-in")
    return tmp_path / "built-in"


@pytest.fixture
def indexed(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The ids of the entries that each build has indexed."""
    builds: list[list[str]] = []
    write = index_writer._write

    def spy(storage: Storage, files: index_writer.Files, *rest: Any) -> object:
        builds.append([path.stem for path, _ in files])
        return write(storage, files, *rest)

    monkeypatch.setattr(index_writer, "_write", spy)
    return builds


def answers() -> list[object]:
    """What the index gives: answers with their scores, and the tables that diagnoses and filters use."""
    with open_index(configured_roots()) as index:
        return contents_of(index)


def contents_of(index: Index) -> list[object]:
    listed = [document for _, document in index.documents()]
    facets = [(index.numbers[number], row) for number, row in index.facets.items()]
    signatures = [(row["id"], row["pattern"]) for row in index.signatures]
    hits = [search(index, question, 5, explain=True) for question in QUESTIONS]
    return [hits, listed, facets, signatures, index.causes, index.masks, index.problems]


def assert_as_built_anew() -> None:
    updated = answers()
    with open_index(configured_roots(), force=True) as index:
        assert updated == contents_of(index)


def built_in_entry(name: str = "address-in-use") -> Path:
    return content_roots.builtin_root().entries / f"{name}.md"


def segments() -> list[dict[str, object]]:
    home = index_cache.home(configured_roots())
    generation = json.loads((home / "current.json").read_text())["generation"]
    rows: list[dict[str, object]] = json.loads((home / generation / "tables.json").read_text())["segments"]
    return rows


def test_the_first_search_after_installation_indexes_nothing(indexed: list[list[str]]) -> None:
    notices: list[str] = []
    with open_index(configured_roots(), notices.append) as index:
        assert len(index) == 3
    assert not indexed
    assert not notices
    assert_as_built_anew()


def test_new_times_of_unchanged_files_index_nothing(indexed: list[list[str]]) -> None:
    before = answers()
    for path in content_roots.builtin_root().entry_files():
        os.utime(path)
    assert answers() == before
    assert indexed == []


def test_private_roots_share_the_installed_segment(content: ContentRoot, indexed: list[list[str]]) -> None:
    content.entry("private", has_probe=False, symptom="The zirconium broke.")
    answers()
    assert indexed == [["private"]]
    assert_as_built_anew()


def edit(content: ContentRoot) -> None:
    content.entry("first", has_probe=False, symptom="The zirconium broke again.")


def add(content: ContentRoot) -> None:
    content.entry("third", has_probe=False, symptom="The zirconium broke.")


def remove(content: ContentRoot) -> None:
    (content.path / "entries" / "first.md").unlink()


def withdraw(content: ContentRoot) -> None:
    path = content.entry("first", has_probe=False)
    path.write_text(path.read_text().replace("status: confirmed", "status: withdrawn"))


def replace_a_built_in_entry(content: ContentRoot) -> None:
    content.entry("address-in-use", has_probe=False, extra="replaces: address-in-use\n")


def take_an_id(content: ContentRoot) -> None:
    content.entry("address-in-use", has_probe=False)


def break_an_entry(content: ContentRoot) -> None:
    (content.path / "entries" / "first.md").write_text("no front matter")


def add_mentioned_entry(content: ContentRoot) -> None:
    content.entry("mentioned", has_probe=False)


def edit_a_built_in_entry(content: ContentRoot) -> None:
    path = built_in_entry()
    path.write_text(path.read_text().replace("## Fix", "The zirconium broke.\n\n## Fix"))


def link(content: ContentRoot) -> None:
    content.entry("first", has_probe=False, extra="causes: [second]\ncaused_by: [address-in-use]\n")


CHANGES = {
    edit: ["first"],
    add: ["third"],
    remove: None,
    withdraw: ["first"],
    replace_a_built_in_entry: ["address-in-use"],
    take_an_id: ["address-in-use"],
    break_an_entry: ["first"],
    add_mentioned_entry: ["mentioned", "second"],
    edit_a_built_in_entry: ["address-in-use"],
    link: ["first"],
}


@pytest.mark.parametrize(("change", "ids"), CHANGES.items(), ids=[change.__name__ for change in CHANGES])
def test_a_change_costs_the_entries_it_concerns_and_the_index_is_as_built_anew(
    content: ContentRoot, indexed: list[list[str]], change: Callable[[ContentRoot], None], ids: list[str] | None
) -> None:
    for name in ("first", "second", "fourth", "fifth"):
        content.entry(name, has_probe=False, symptom=f"The {name} thing broke, as in `mentioned`.")
    answers()
    indexed.clear()
    if change is add_mentioned_entry:
        ids = ["fifth", "first", "fourth", "mentioned", "second"]
    change(content)
    answers()
    assert indexed == ([ids] if ids else [])
    assert_as_built_anew()


def test_an_unchanged_index_is_opened_without_reading_an_entry(
    content: ContentRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    content.entry("private", has_probe=False)
    before = answers()
    monkeypatch.setattr(fingerprints, "file_states", None)
    assert answers() == before


def test_many_edits_leave_few_segments(content: ContentRoot, indexed: list[list[str]]) -> None:
    names = [f"entry-{number:02}" for number in range(20)]
    for name in names:
        content.entry(name, has_probe=False)
    answers()
    for name in names:
        content.entry(name, has_probe=False, symptom=f"The zirconium broke in {name}.")
        with open_index(configured_roots()) as index:
            assert search(index, f"zirconium {name.replace('-', ' ')}", 1).hits
        assert len(segments()) <= index_update.MOST_SEGMENTS
    assert sum(map(len, indexed[1:])) < 5 * len(names)
    assert_as_built_anew()


def test_an_entry_edited_again_and_again_leaves_no_segments_behind(content: ContentRoot) -> None:
    for name in ("first", "second", "third"):
        content.entry(name, has_probe=False)
    answers()
    for number in range(5):
        content.entry("first", has_probe=False, symptom=f"The zirconium broke {number} times.")
        answers()
    assert len(segments()) == 3
    assert len(list(index_cache.home(configured_roots()).glob("segment-*"))) == 2


def test_a_changed_recipe_makes_the_installed_segment_useless(
    indexed: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprints, "__version__", "another")
    answers()
    assert [len(ids) for ids in indexed] == [3]


def test_doctor_takes_the_installed_index_for_fresh_and_an_edited_entry_for_stale() -> None:
    index = open_if_fresh(configured_roots())
    assert index
    with index:
        assert len(index) == 3
    edit_a_built_in_entry(ContentRoot(built_in_entry().parents[1]))
    assert open_if_fresh(configured_roots()) is None


def test_a_bulk_build_is_shared_among_processes_and_answers_as_one_of_one_process(
    content: ContentRoot, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(8):
        content.entry(f"entry-{number}", has_probe=False, symptom=f"The zirconium broke {number} times.")
    (content.path / "entries" / "broken.md").write_text("no front matter")
    expected = answers()
    monkeypatch.setattr(index_workers, "segments_for", lambda _: 3)
    with open_index(configured_roots(), force=True) as index:
        assert contents_of(index) == expected
    assert len(segments()) == 3


@pytest.mark.parametrize("python", ["/bin/false", "/bin/none"])
def test_without_other_processes_a_bulk_build_is_done_by_one(
    content: ContentRoot, monkeypatch: pytest.MonkeyPatch, python: str
) -> None:
    for number in range(4):
        content.entry(f"entry-{number}", has_probe=False)
    expected = answers()
    monkeypatch.setattr(index_workers, "segments_for", lambda _: 2)
    monkeypatch.setattr(sys, "executable", python)
    with open_index(configured_roots(), force=True) as index:
        assert contents_of(index) == expected


def test_what_is_read_is_there_after_closing() -> None:
    index = open_index(configured_roots())
    index.document(0)
    index.close()
    assert index.document(0)["id"]


def test_the_recipe_names_every_module_that_only_a_build_loads() -> None:
    """What a search loads too is listed by hand: the tokenizer, the codec, the literals of patterns."""
    script = (
        "import sys, kb.search.ranking, kb.search.index_update; before = set(sys.modules);"
        "import kb.search.index_writer; print(*sorted(set(sys.modules) - before))"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    names = {name.removeprefix("kb.").replace(".", "/") + ".py" for name in ended.stdout.split() if "kb." in name}
    names = {name for name in names if name.startswith(("search/", "content/", "patterns/"))}
    assert names - {"content/area.py", "content/grades.py"} <= set(fingerprints.RECIPE)
    assert all((fingerprints.PACKAGE / name).is_file() for name in fingerprints.RECIPE)


def test_the_installed_segment_belongs_to_the_entries_that_are_installed_with_it() -> None:
    root: Root = content_roots.builtin_root()
    rows = json.loads((generation.BUILT_IN_SEGMENT / "records.json").read_text())["records"]
    assert {row["id"] for row in rows} == {path.stem for path in root.entry_files()}
