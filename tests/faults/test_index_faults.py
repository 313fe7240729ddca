"""The index is a cache: whatever happens to it, the next search finds the entry."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kb.content.roots import builtin_root, configured_roots
from kb.search import built_in_index, generation, index_cache
from tests.support.console import ContentRoot, Kb, end
from tests.support.mounted import may_mount, run_mounted
from tests.support.warm_start import PIPE, start_warm

QUESTION = "ALLGATHER timeout save"
ANSWER = "checkpoint-save-allgather-timeout"
SEARCH = ("kb.cli.main", "kb.cli.commands.search", "kb.search.index_writer", "kb.search.index_update")


@pytest.fixture
def no_built_in_segment(few_entries: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three entries, and none of them indexed by the installation; returns where it would have its segment."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(generation, "BUILT_IN_SEGMENT", tmp_path / "built-in")
    return tmp_path / "built-in"


def first_hit(kb: Kb, **env: str) -> str:
    ended = kb("search", QUESTION, "--json", **env)
    assert ended.code == 0, ended.err
    return str(ended.json["hits"][0]["id"])


def index_home() -> Path:
    return index_cache.home(configured_roots())


def tables() -> tuple[Path, list[str]]:
    """The file of the current generation, and the names of its segments."""
    pointer = json.loads((index_home() / "current.json").read_text())
    path = index_home() / str(pointer["generation"]) / "tables.json"
    return path, [row["path"] for row in json.loads(path.read_text())["segments"]]


def segments_on_disk() -> set[str]:
    return {path.name for path in index_home().glob("segment-*")}


def truncate_postings(path: Path) -> None:
    for file in path.glob("*.seg"):
        file.write_bytes(file.read_bytes()[:100])


def flip_bytes(path: Path) -> None:
    for file in path.glob("*.seg"):
        data = bytearray(file.read_bytes())
        for at in range(0, len(data), 7):
            data[at] ^= 0x5A
        file.write_bytes(bytes(data))


def empty_toc(path: Path) -> None:
    for file in path.glob("*.toc"):
        file.write_bytes(b"")


def foreign_toc(path: Path) -> None:
    for file in path.glob("*.toc"):
        file.write_bytes(pickle.dumps({"not": "an index"}))


def remove_postings(path: Path) -> None:
    for file in path.glob("*.seg"):
        file.unlink()


def garbage_tables(path: Path) -> None:
    (path / "tables.json").write_text("{")


def garbage_records(path: Path) -> None:
    """Only an update reads them."""
    (path / "records.json").write_text("[]")
    (path.parent / "current.json").unlink(missing_ok=True)


def remove_lookups(path: Path) -> None:
    (path / "lookups.json").unlink()


def remove_segment(path: Path) -> None:
    shutil.rmtree(path)


def other_entries(path: Path) -> None:
    """Another segment in its place, which may have the same numbers for other entries."""
    rows = json.loads((path / "tables.json").read_text())
    (path / "tables.json").write_text(json.dumps({**rows, "identity": "another"}))


DAMAGE: list[Callable[[Path], None]] = [
    truncate_postings,
    flip_bytes,
    empty_toc,
    foreign_toc,
    remove_postings,
    garbage_tables,
    garbage_records,
    remove_lookups,
    other_entries,
    remove_segment,
]


def damaging(test: Callable[..., None]) -> Callable[..., None]:
    """The test for each kind of damage. Whoosh leaves files of a torn index open."""
    for mark in (
        pytest.mark.parametrize("damage", DAMAGE, ids=[damage.__name__ for damage in DAMAGE]),
        pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    ):
        test = mark(test)
    return test


@damaging
def test_a_damaged_segment_is_built_again(kb: Kb, no_built_in_segment: Path, damage: Callable[[Path], None]) -> None:
    assert first_hit(kb) == ANSWER
    _, (segment,) = tables()
    damage(index_home() / segment)
    assert first_hit(kb) == ANSWER
    assert first_hit(kb) == ANSWER


@damaging
def test_a_damaged_segment_of_the_installation_is_replaced_in_the_cache(
    kb: Kb, no_built_in_segment: Path, damage: Callable[[Path], None]
) -> None:
    built_in_index.build(no_built_in_segment)
    assert first_hit(kb) == ANSWER
    assert tables()[1] == ["built-in"]
    damage(no_built_in_segment)
    assert first_hit(kb) == ANSWER
    assert first_hit(kb) == ANSWER


@pytest.mark.parametrize("name", ["current.json", "tables.json", "files.json"])
@pytest.mark.parametrize("content", ["", "[]", '{"segments": [{}]}'])
def test_a_damaged_generation_is_written_again(kb: Kb, no_built_in_segment: Path, name: str, content: str) -> None:
    assert first_hit(kb) == ANSWER
    path, _ = tables()
    (index_home() / name if name == "current.json" else path.with_name(name)).write_text(content)
    assert first_hit(kb) == ANSWER
    for entry in builtin_root().entry_files():
        os.utime(entry)
    assert first_hit(kb) == ANSWER


def test_an_index_that_others_can_write_is_never_opened(kb: Kb, no_built_in_segment: Path) -> None:
    """Opening an index runs pickles: one in a directory that others can write could hold anything."""
    assert first_hit(kb) == ANSWER
    index_home().chmod(0o777)
    ended = kb("search", QUESTION, "--json")
    assert ended.json["hits"][0]["id"] == ANSWER
    assert "builds it in memory" in ended.err


@pytest.mark.parametrize("obstacle", ["a file", "a missing device"])
def test_without_a_writable_cache_a_search_builds_in_memory_and_says_so(
    kb: Kb, no_built_in_segment: Path, tmp_path: Path, obstacle: str
) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    cache = str(blocked / "cache") if obstacle == "a file" else "/proc/none/cache"
    ended = kb("search", QUESTION, "--json", XDG_CACHE_HOME=cache)
    assert ended.json["hits"][0]["id"] == ANSWER
    assert "builds it in memory" in ended.err


def test_without_a_writable_cache_the_installed_index_is_used_as_it_is(kb: Kb, no_built_in_segment: Path) -> None:
    built_in_index.build(no_built_in_segment)
    ended = kb("search", QUESTION, "--json", XDG_CACHE_HOME="/proc/none/cache")
    assert ended.json["hits"][0]["id"] == ANSWER
    assert ended.err == ""


@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
@pytest.mark.usefixtures("few_entries")
@pytest.mark.parametrize("options", ["size=16k", "ro"], ids=["full disk", "read-only home"])
def test_a_full_or_read_only_disk_costs_the_cache_and_the_record_never_the_answer(
    tmp_path: Path, content: ContentRoot, options: str
) -> None:
    """In a mount namespace of its own: the machine's file systems stay as they are."""
    content.entry("private", has_probe=False)
    home = tmp_path / "home"
    home.mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": f"{home}/c", "XDG_DATA_HOME": f"{home}/d"}
    ended = run_mounted(options, home, ["search", QUESTION, "--json"], ["history", "--json"], **places)
    first = json.loads(ended.out.splitlines()[0])
    assert first["hits"][0]["id"] == ANSWER, ended.err
    assert "builds it in memory" in ended.err


@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
@pytest.mark.usefixtures("few_entries")
@pytest.mark.parametrize("kib", [4, 8, 12])
def test_a_disk_that_fills_up_under_the_arms_is_never_a_success(tmp_path: Path, content: ContentRoot, kib: int) -> None:
    """Wherever it runs out, of the specification, a log, a result or the guard's record: a reason, and nothing left."""
    content.incident("breaks")
    disk = tmp_path / "disk"
    disk.mkdir()
    ended = run_mounted(f"size={kib}k", disk, ["verify", "breaks", "--json"], TMPDIR=str(disk))
    document = ended.json
    if document["ok"]:
        assert document["verdict"] == "inconclusive"
        assert document["reason"]
        assert ended.code == 3
    else:
        assert document["error"]["type"] == "launch-error"
        assert ended.code == 5
    assert "kb-arm-" not in ended.err


def test_searches_that_build_at_once_all_answer(tmp_path: Path, content: ContentRoot) -> None:
    content.entry("private", has_probe=False, symptom="The zirconium broke.")
    processes = [
        start_warm("search", "zirconium", "--json", imports=SEARCH, stdout=PIPE, stderr=PIPE, cwd=tmp_path)
        for _ in range(3)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert json.loads(out)["hits"][0]["id"] == "private"
        assert process.returncode == 0


SLOW_BUILD = """
import time
from kb.content.roots import configured_roots
from kb.search import document, index_cache

def slow(*args, **options):
    print("building", flush=True)
    time.sleep(30)

document.document = slow
index_cache.open_index(configured_roots())
"""


def test_a_build_killed_in_the_middle_leaves_the_old_index_and_no_lock(kb: Kb, content: ContentRoot) -> None:
    content.entry("private", has_probe=False)
    assert first_hit(kb) == ANSWER
    _, before = tables()
    content.entry("private", has_probe=False, symptom="The zirconium broke.")
    builder = subprocess.Popen([sys.executable, "-c", SLOW_BUILD], stdout=subprocess.PIPE)
    try:
        assert builder.stdout
        assert builder.stdout.readline() == b"building\n"
        assert tables()[1] == before
        assert segments_on_disk() > set(before) - {"built-in"}
    finally:
        end(builder, signal.SIGKILL)
        if builder.stdout:
            builder.stdout.close()
    assert kb("search", "zirconium", "--json").json["hits"][0]["id"] == "private"
    assert segments_on_disk() == set(tables()[1]) - {"built-in"}


@pytest.mark.parametrize("step", ["_write", "_open"], ids=["written", "opened"])
def test_an_index_that_others_delete_again_and_again_costs_no_answer(
    kb: Kb, no_built_in_segment: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    do = getattr(index_cache, step)

    def do_and_delete(directory: Path, *args: object) -> object:
        result = do(directory, *args)
        shutil.rmtree(directory, ignore_errors=True)
        return result

    assert not no_built_in_segment.exists()
    monkeypatch.setattr(index_cache, step, do_and_delete)
    assert first_hit(kb) == ANSWER
