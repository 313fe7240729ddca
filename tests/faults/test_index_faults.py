"""The index is a cache: whatever happens to it, the next search finds the entry."""

from __future__ import annotations

import json
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kb.content.roots import builtin_root
from kb.search import index
from tests.support.console import KB, Kb, end, wait_for

QUESTION = "ALLGATHER timeout save"
ANSWER = "checkpoint-save-allgather-timeout"


def may_mount() -> bool:
    """In a mount namespace of its own: root of a container often may not."""
    try:
        tried = subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "none", "/tmp"], capture_output=True)
    except OSError:
        return False
    return tried.returncode == 0


def first_hit(kb: Kb, **env: str) -> str:
    ended = kb("search", QUESTION, "--json", **env)
    assert ended.code == 0, ended.err
    return str(ended.json["hits"][0]["id"])


def index_home(home: Path) -> Path:
    assert index.home((builtin_root(),)).is_relative_to(home)
    return index.home((builtin_root(),))


def generation(home: Path) -> Path:
    pointer = json.loads((index_home(home) / "current.json").read_text())
    return index_home(home) / str(pointer["generation"])


def truncate_segments(path: Path) -> None:
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


def remove_segments(path: Path) -> None:
    for file in path.glob("*.seg"):
        file.unlink()


def garbage_side_table(path: Path) -> None:
    (path / "side.json").write_text("{")


def remove_generation(path: Path) -> None:
    shutil.rmtree(path)


def garbage_pointer(path: Path) -> None:
    (path.parent / "current.json").write_text("[]")


DAMAGE = [
    truncate_segments,
    flip_bytes,
    empty_toc,
    foreign_toc,
    remove_segments,
    garbage_side_table,
    remove_generation,
    garbage_pointer,
]


@pytest.mark.parametrize("damage", DAMAGE, ids=[one.__name__ for one in DAMAGE])
def test_a_damaged_index_is_built_again(kb: Kb, home: Path, damage: Callable[[Path], None]) -> None:
    assert first_hit(kb) == ANSWER
    damage(generation(home))
    assert first_hit(kb) == ANSWER
    assert first_hit(kb) == ANSWER


def test_an_index_that_others_can_write_is_never_opened(kb: Kb, home: Path) -> None:
    """Opening an index runs pickles: one in a directory that others can write could hold anything."""
    assert first_hit(kb) == ANSWER
    index_home(home).chmod(0o777)
    ended = kb("search", QUESTION, "--json")
    assert ended.json["hits"][0]["id"] == ANSWER
    assert "builds it in memory" in ended.err


@pytest.mark.parametrize("obstacle", ["a file", "a missing device"])
def test_without_a_writable_cache_a_search_builds_in_memory_and_says_so(kb: Kb, tmp_path: Path, obstacle: str) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("")
    cache = str(blocked / "cache") if obstacle == "a file" else "/proc/none/cache"
    ended = kb("search", QUESTION, "--json", XDG_CACHE_HOME=cache)
    assert ended.json["hits"][0]["id"] == ANSWER
    assert "builds it in memory" in ended.err


@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
@pytest.mark.parametrize("options", ["size=16k", "ro"], ids=["full disk", "read-only home"])
def test_a_full_or_read_only_disk_costs_the_cache_and_the_record_never_the_answer(tmp_path: Path, options: str) -> None:
    """In a mount namespace of its own: the machine's file systems stay as they are."""
    script = (
        f"mount -t tmpfs -o {options} none {tmp_path} && export HOME={tmp_path} XDG_CACHE_HOME={tmp_path}/c "
        f"XDG_DATA_HOME={tmp_path}/d && {KB} search '{QUESTION}' --json && {KB} history --json; echo code $? >&2"
    )
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=120)
    first = json.loads(ended.stdout.splitlines()[0])
    assert first["hits"][0]["id"] == ANSWER, ended.stderr
    assert "builds it in memory" in ended.stderr


@pytest.mark.skipif(not may_mount(), reason="no file system can be mounted here")
@pytest.mark.parametrize("kib", [4, 8, 12, 16, 24])
def test_a_disk_that_fills_up_under_the_arms_is_never_a_success(tmp_path: Path, kib: int) -> None:
    """Wherever it runs out, of the specification, a log, a result or the guard's record: a reason, and nothing left."""
    script = (
        f"mount -t tmpfs -o size={kib}k none {tmp_path} && "
        f"TMPDIR={tmp_path} {KB} verify {ANSWER} --json; echo code $? >&2; ls {tmp_path} >&2"
    )
    ended = subprocess.run(["unshare", "--mount", "sh", "-c", script], capture_output=True, text=True, timeout=180)
    document = json.loads(ended.stdout)
    if document["ok"]:
        assert document["verdict"] == "inconclusive"
        assert document["reason"]
        assert "code 3" in ended.stderr
    else:
        assert document["error"]["type"] == "launch-error"
        assert "code 5" in ended.stderr
    assert "kb-arm-" not in ended.stderr


def test_two_searches_that_build_at_once_both_answer(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen([str(KB), "search", QUESTION, "--json"], stdout=subprocess.PIPE, cwd=tmp_path)
        for _ in range(4)
    ]
    for process in processes:
        out, _ = process.communicate(timeout=120)
        assert json.loads(out)["hits"][0]["id"] == ANSWER
        assert process.returncode == 0


SLOW_BUILD = """
import time
from kb import document, index, root

def slow(*args, **options):
    print("building", flush=True)
    time.sleep(30)

document.document = slow
index.open_index(root.configured())
"""


def test_a_build_killed_in_the_middle_leaves_the_old_index_and_no_lock(kb: Kb, home: Path) -> None:
    assert first_hit(kb) == ANSWER
    before = generation(home)
    (index_home(home) / "current.json").write_text(json.dumps({"stamp": "stale", "generation": before.name}))
    builder = subprocess.Popen([sys.executable, "-c", SLOW_BUILD], stdout=subprocess.PIPE)
    try:
        assert builder.stdout
        assert builder.stdout.readline() == b"building\n"
        assert len(list(index_home(home).glob("generation-*"))) == 2
    finally:
        end(builder, signal.SIGKILL)
        if builder.stdout:
            builder.stdout.close()
    assert first_hit(kb) == ANSWER
    wait_for(lambda: len(list(index_home(home).glob("generation-*"))) == 1, "what the killed build left to be removed")


def test_an_edited_entry_is_found_by_its_new_words(kb: Kb, content: object) -> None:
    from tests.support.console import ContentRoot

    assert isinstance(content, ContentRoot)
    content.entry("edited", has_probe=False)
    assert kb("search", "zirconium", "--json").code == 1
    time.sleep(0.01)
    content.entry("edited", has_probe=False, symptom="The zirconium broke.")
    assert kb("search", "zirconium", "--json").json["hits"][0]["id"] == "edited"
