"""The bytes of an input: compressed, damaged, growing, shrinking, from pipes."""

from __future__ import annotations

import gzip
import io
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from kb.diagnose.inputs.sources import Source, Stream, find_sources
from kb.diagnose.inputs.streams import HEAD

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

TEXT = "".join(f"[rank{n % 8}]: step {n} loss {n * 7919 % 1000}\n" for n in range(20_000)).encode()
RANDOM = random.Random(4)
NOISE = b"".join(b"%d %s\n" % (n, RANDOM.randbytes(12).hex().encode()) for n in range(40_000))


def read_source(source: Source) -> tuple[bytes, list[str]]:
    """Its bytes, and the problems that were reported."""
    problems: list[str] = []
    with source.open(problems.append) as stream:
        return stream.read(), problems


def only(path: Path) -> Source:
    (source,) = find_sources([str(path)]).inputs
    return source


def test_a_file_is_read_as_it_is_with_its_line_ends_and_broken_utf_8(tmp_path: Path) -> None:
    data = b"one\r\ntwo\xff\xfe\n\xe4\xb8\xad\xe6\x96\x87\n" + TEXT
    (tmp_path / "a.log").write_bytes(data)
    assert read_source(only(tmp_path / "a.log")) == (data, [])


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_compressed_logs_are_known_by_content_and_may_have_several_members(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    (tmp_path / "stderr.log").write_bytes(pack(TEXT) + pack(b"") + pack(b"the end\n"))
    assert read_source(only(tmp_path / "stderr.log")) == (TEXT + b"the end\n", [])


def test_a_name_that_promises_compression_is_not_believed(tmp_path: Path) -> None:
    (tmp_path / "a.gz").write_bytes(TEXT)
    assert read_source(only(tmp_path / "a.gz")) == (TEXT, [])


def test_a_skippable_frame_in_front_is_zstd_too(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd" + zstd.compress(TEXT))
    assert read_source(only(tmp_path / "a")) == (TEXT, [])


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress], ids=["gz", "zst"])
def test_of_a_truncated_archive_the_front_is_read_and_the_end_is_missed_aloud(tmp_path: Path, pack: object) -> None:
    assert callable(pack)
    packed = pack(NOISE)
    (tmp_path / "a").write_bytes(packed[: len(packed) // 2])
    data, problems = read_source(only(tmp_path / "a"))
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
    data, problems = read_source(only(tmp_path / "a"))
    assert len(data) > len(NOISE) // 8
    assert NOISE.startswith(data[: len(NOISE) // 8])
    assert problems, "damage must be told"


def test_garbage_behind_an_archive_is_told_and_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(TEXT) + b"garbage")
    data, problems = read_source(only(tmp_path / "a"))
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
    assert read_source(only(tmp_path / "a.log")) == (text.encode(), [])


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
    data, problems = read_source(source)
    assert data == b""
    assert problems == [f"{path}: cannot be read: No such file or directory"]


def test_a_file_that_became_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(TEXT)
    source = only(path)
    path.unlink()
    os.mkfifo(path)
    data, problems = read_source(source)
    assert data == b""
    assert "no longer a regular file" in problems[0]


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
    assert read_source(source) == (TEXT, [])
    writer.join(60)


def test_standard_input_is_a_source_and_stays_open(monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(zstd.compress(TEXT)))
    monkeypatch.setattr(sys, "stdin", stdin)
    (source,) = find_sources(["-", "-"]).inputs
    assert source.name == "-"
    assert read_source(source) == (TEXT, [])
    assert not stdin.buffer.closed


def test_the_head_is_seen_without_being_taken(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(gzip.compress(TEXT))
    with only(tmp_path / "a").open() as stream:
        assert stream.peek(HEAD) == TEXT[:HEAD]
        assert stream.read() == TEXT
