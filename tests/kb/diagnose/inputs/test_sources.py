"""Inputs of a diagnosis: real files, pipes and folders, whatever state they are in."""

from __future__ import annotations

import gzip
import io
import os
import random
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kb.diagnose.inputs.sources import Source, Sources, Stream, find_sources
from kb.diagnose.inputs.streams import HEAD
from kb.errors import UsageError

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = "".join(f"[rank{n % 8}]: step {n} loss {n * 7919 % 1000}\n" for n in range(20_000)).encode()
RANDOM = random.Random(4)
NOISE = b"".join(b"%d %s\n" % (n, RANDOM.randbytes(12).hex().encode()) for n in range(40_000))


def read(source: Source) -> tuple[bytes, list[str]]:
    problems: list[str] = []
    with source.open(problems.append) as stream:
        return stream.read(), problems


def only(path: Path) -> Source:
    (source,) = find_sources([str(path)]).inputs
    return source


def names(found: Sources, below: Path) -> list[str]:
    return [str(Path(source.name).relative_to(below)) for source in found.inputs]


def test_a_file_is_read_as_it_is_with_its_line_ends_and_broken_utf_8(tmp_path: Path) -> None:
    data = b"one\r\ntwo\xff\xfe\n\xe4\xb8\xad\xe6\x96\x87\n" + TEXT
    (tmp_path / "a.log").write_bytes(data)
    assert read(only(tmp_path / "a.log")) == (data, [])


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_compressed_logs_are_known_by_content_and_may_have_several_members(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    (tmp_path / "stderr.log").write_bytes(pack(TEXT) + pack(b"") + pack(b"the end\n"))
    assert read(only(tmp_path / "stderr.log")) == (TEXT + b"the end\n", [])


def test_a_name_that_promises_compression_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(TEXT)
    assert read(only(tmp_path / "a.gz")) == (TEXT, [])


def test_a_skippable_frame_in_front_is_zstd_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd.compress(TEXT))
    assert read(only(tmp_path / "a")) == (TEXT, [])


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_of_a_truncated_archive_the_front_is_read_and_the_end_is_missed_aloud(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    packed = pack(NOISE)
    (tmp_path / "a").write_bytes(packed[: len(packed) // 2])
    data, problems = read(only(tmp_path / "a"))
    assert NOISE.startswith(data)
    assert len(data) > len(NOISE) // 4
    assert len(problems) == 1
    assert "ends too early" in problems[0]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_of_a_damaged_archive_the_front_is_read(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    packed = bytearray(pack(NOISE))
    packed[len(packed) // 2 : len(packed) // 2 + 400] = b"\xff" * 400
    (tmp_path / "a").write_bytes(packed)
    data, problems = read(only(tmp_path / "a"))
    assert len(data) > len(NOISE) // 8
    assert NOISE.startswith(data[: len(NOISE) // 8])
    assert problems, "damage must be told"


def test_garbage_behind_an_archive_is_told_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(TEXT) + b"garbage")
    data, problems = read(only(tmp_path / "a"))
    assert data == TEXT
    assert len(problems) == 1


def test_a_decompression_bomb_is_a_stream_of_small_pieces(tmp_path: Path) -> None:
    """256 MiB of one letter, in a process that may have 128 MiB more than it needs to start."""
    (tmp_path / "bomb").write_bytes(gzip.compress(b"A" * (64 << 20)) * 4)
    code = (
        "import resource, sys\n"
        "from kb.diagnose.inputs.sources import find_sources\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20),) * 2)\n"
        "(source,) = find_sources([sys.argv[1]]).inputs\n"
        "print(sum(map(len, iter(lambda stream=source.open(): stream.read(1 << 20), b''))))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code, str(tmp_path / "bomb")], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout.strip()) == (0, str(256 << 20)), ended.stderr


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_what_arrives_is_unpacked_as_far_as_is_allowed_and_the_rest_is_missed_aloud(pack: object) -> None:
    assert callable(pack)

    def unpacked(most: int) -> tuple[bytes, list[str]]:
        problems: list[str] = []
        with Stream("body", iter([pack(TEXT)]), most=most).open(problems.append) as stream:
            return stream.read(), problems

    assert unpacked(len(TEXT)) == (TEXT, [])
    for most in (1, HEAD, 100_000, 2 * HEAD):
        data, problems = unpacked(most)
        assert data == TEXT[:most]
        assert len(problems) == 1
        assert f"larger than {most:,} bytes" in problems[0]


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be"])
def test_utf_16_with_its_mark_becomes_utf_8(tmp_path: Path, encoding: str) -> None:
    text = "训练 CUDA out of memory\n" * 10_000
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    (tmp_path / "a.log").write_bytes(mark + text.encode(encoding))
    assert read(only(tmp_path / "a.log")) == (text.encode(), [])


def test_a_log_that_grows_while_it_is_read_ends_where_it_ended_when_opened(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(TEXT)
    with only(path).open() as stream, path.open("ab") as writer:
        got = stream.read(100)
        writer.write(b"later\n")
        writer.flush()
        got += stream.read()
    assert got == TEXT


def test_a_log_that_shrinks_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path, problems = tmp_path / "a.log", list[str]()
    path.write_bytes(TEXT)
    with only(path).open(problems.append) as stream:
        got = stream.read(1)
        os.truncate(path, 100)
        got += stream.read()
    assert TEXT.startswith(got)
    assert len(got) < len(TEXT)
    assert len(problems) == 1
    assert "are missing" in problems[0]


def test_a_file_that_vanishes_before_it_is_opened_is_a_problem_and_no_error(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(TEXT)
    source = only(path)
    path.unlink()
    data, problems = read(source)
    assert data == b""
    assert problems == [f"{path}: cannot be read: No such file or directory"]


def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(TEXT)
    source = only(path)
    path.unlink()
    os.mkfifo(path)
    data, problems = read(source)
    assert data == b""
    assert "no regular file any more" in problems[0]


def test_a_named_pipe_is_read_to_its_end_also_when_it_dribbles(tmp_path: Path) -> None:
    path, packed = tmp_path / "pipe", gzip.compress(TEXT)
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as writer:
            for at in range(20):
                writer.write(packed[at : at + 1])
            writer.write(packed[20:])

    writer = threading.Thread(target=write, daemon=True)
    source = only(path)
    writer.start()
    assert read(source) == (TEXT, [])
    writer.join(60)


def test_standard_input_is_a_source_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(zstd.compress(TEXT)))
    monkeypatch.setattr(sys, "stdin", stdin)
    (source,) = find_sources(["-", "-"]).inputs
    assert source.name == "-"
    assert read(source) == (TEXT, [])
    assert not stdin.buffer.closed


def test_the_head_is_seen_without_being_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(TEXT))
    with only(tmp_path / "a").open() as stream:
        assert stream.peek(HEAD) == TEXT[:HEAD]
        assert stream.read() == TEXT


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
    wanted = [
        f"run_x/attempt_0/{rank}/{name}" for rank in range(3) for name in ("error.json", "stderr.log", "stdout.log")
    ]
    assert names(sources, tmp_path) == wanted
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
    source = only(tmp_path)
    assert source.name.encode("utf-8").endswith("bad\ufffd.log".encode())
    assert read(source) == (b"x\n", [])
