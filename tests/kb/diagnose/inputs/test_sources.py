"""Which inputs arguments name: files, folders and links, whatever state they are in."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from kb.diagnose.inputs.sources import Sources, find_sources
from kb.errors import UsageError


def names(sources: Sources, below: Path) -> list[str]:
    return [str(Path(source.name).relative_to(below)) for source in sources.inputs]


@pytest.mark.parametrize("path", ["/no/such/file", "/dev/null", "/dev/zero", "a\0b"])
def test_an_argument_that_cannot_be_read_is_an_error_of_usage(path: str) -> None:
    with pytest.raises(UsageError):
        find_sources([path])


def test_a_socket_and_an_empty_folder_are_errors_of_usage(tmp_path: Path) -> None:
    (tmp_path / "empty" / "below").mkdir(parents=True)
    with pytest.raises(UsageError, match="holds no log"):
        find_sources([str(tmp_path / "empty")])
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        with pytest.raises(UsageError, match="neither a file"):
            find_sources([str(tmp_path / "socket")])


def test_a_tree_of_logs_is_read_in_order_and_foreign_things_are_not(tmp_path: Path) -> None:
    for rank in range(3):
        for name in ("stdout.log", "stderr.log", "error.json"):
            path = tmp_path / "run_x" / "attempt_0" / str(rank) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("line\n")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("x")
    (tmp_path / ".hidden").write_text("x")
    (tmp_path / "model.log").write_bytes(b"PK\x03\x04 a checkpoint")
    (tmp_path / "core.txt").write_bytes(b"\x7fELF\0\0")
    os.mkfifo(tmp_path / "pipe.log")
    (tmp_path / "nowhere.log").symlink_to("gone")
    sources = find_sources([str(tmp_path)])
    expected = [
        f"run_x/attempt_0/{rank}/{name}" for rank in range(3) for name in ("error.json", "stderr.log", "stdout.log")
    ]
    assert names(sources, tmp_path) == expected
    assert sources.problems == (f"{tmp_path}: left out as binary: 2",)


def test_links_are_followed_loops_end_and_a_file_counts_once(tmp_path: Path) -> None:
    (tmp_path / "a" / "run-1").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a" / "run-1" / "x.log").write_text("x\n")
    (tmp_path / "elsewhere" / "y.log").write_text("y\n")
    (tmp_path / "a" / "latest").symlink_to("run-1")
    (tmp_path / "a" / "run-1" / "up").symlink_to("..")
    (tmp_path / "a" / "away").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "a" / "itself").symlink_to("itself")
    (tmp_path / "a" / "debug.log").symlink_to("run-1/x.log")
    sources = find_sources([str(tmp_path / "a"), str(tmp_path / "a" / "run-1" / "x.log")])
    assert names(sources, tmp_path) == ["a/away/y.log", "a/run-1/x.log"]
    assert sources.problems == ()


def test_of_many_files_those_written_last_are_read_and_the_others_are_counted(tmp_path: Path) -> None:
    for number in range(3000):
        (tmp_path / f"{number:04}.log").write_text("x\n")
        os.utime(tmp_path / f"{number:04}.log", (number, 1_000_000 + (number * 7) % 3000))
    (tmp_path / "weights").write_bytes(b"bin\0ary")  # newest, and takes nobody's place
    sources = find_sources([str(tmp_path)], most_files=10)
    newest = sorted(range(3000), key=lambda number: (number * 7) % 3000)[-10:]
    assert names(sources, tmp_path) == sorted(f"{number:04}.log" for number in newest)
    assert sources.problems == (
        f"{tmp_path}: left out as older than what is read: 2,990",
        f"{tmp_path}: left out as binary: 1",
    )


def test_a_walk_ends_and_says_so_and_looks_near_before_far(tmp_path: Path) -> None:
    (tmp_path / "z").mkdir()
    for number in range(300):
        (tmp_path / "z" / f"{number}").write_text("x")
    (tmp_path / "main.log").write_text("x")
    sources = find_sources([str(tmp_path)], most_entries=100)
    assert "main.log" in names(sources, tmp_path)
    assert len(sources.inputs) == 99
    assert "more than 100 files and folders" in sources.problems[0]


def test_what_may_not_be_read_in_a_folder_is_a_sentence_and_as_argument_an_error(tmp_path: Path) -> None:
    (tmp_path / "open.log").write_text("x\n")
    (tmp_path / "closed.log").write_text("x\n")
    (tmp_path / "closed").mkdir()
    for path in (tmp_path / "closed.log", tmp_path / "closed"):
        path.chmod(0)
    try:
        if os.access(tmp_path / "closed.log", os.R_OK):
            pytest.skip("this user may read everything")
        sources = find_sources([str(tmp_path)])
        assert names(sources, tmp_path) == ["open.log"]
        assert "left out as unreadable: 2, the first is " in sources.problems[0]
        assert "Permission denied" in sources.problems[0]
        with pytest.raises(UsageError, match="Permission denied"):
            find_sources([str(tmp_path / "closed.log")])
    finally:
        (tmp_path / "closed").chmod(0o700)


def test_a_name_that_is_no_utf_8_can_be_printed(tmp_path: Path) -> None:
    path = os.fsencode(tmp_path) + b"/bad\xff.log"
    Path(os.fsdecode(path)).write_bytes(b"x\n")
    (source,) = find_sources([str(tmp_path)]).inputs
    assert source.name.encode("utf-8").endswith("bad\ufffd.log".encode())
    with source.open() as stream:
        assert stream.read() == b"x\n"
