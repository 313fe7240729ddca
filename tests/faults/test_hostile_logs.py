"""Logs that are none, or were made to harm: an answer in constant memory, a sentence about what was not read."""

from __future__ import annotations

import gzip
import os
import pickle
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kb.content.catalog import load_catalog
from kb.content.roots import builtin_root
from kb.diagnose.inputs.sources import Stream, find_sources
from kb.diagnose.scan.result import Scan
from kb.diagnose.scan.scan import Limits, scan
from kb.diagnose.scan.signature_matcher import Matcher
from kb.patterns.literals import literals
from kb.patterns.redos_timing import pumped
from tests.support.console import CHECKOUT

SIGNATURES = [signature for entry in load_catalog((builtin_root(),)) for signature in entry.meta.signatures]
MATCHER = Matcher(
    {
        "id": str(number),
        "role": signature.role.value,
        "pattern": signature.pattern,
        "literals": sorted(literals(signature.pattern)),
    }
    for number, signature in enumerate(SIGNATURES)
)
MEBIBYTE = 1 << 20
GROUPS = 16  # of signatures, for tests that run side by side
LONG_LINE = 256 << 10  # bytes: many times what is examined of a line at once
OOM = b"torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.25 GiB. GPU 0 has a total capacity of 79 GiB\n"


def read(*paths: Path) -> Scan:
    return scan(find_sources([str(path) for path in paths]).inputs, MATCHER)


def stream(data: bytes) -> Scan:
    return scan([Stream("body", iter([data]))], MATCHER)


def shows_oom(scan: Scan) -> bool:
    return any("out of memory" in match.text for match in scan.matches)


@given(st.binary(max_size=5000))
@settings(max_examples=200)
def test_any_bytes_are_read(data: bytes) -> None:
    stream(data)


@given(st.lists(st.sampled_from([*(literal for signature in SIGNATURES for literal in literals(signature.pattern)), "\n", "\r", "[rank1]: ", "│", "╰─", "\x1b[1m", "\x1b", "\0"]), max_size=60), st.binary(max_size=40))  # fmt: skip
@settings(max_examples=300)
def test_any_literals_in_any_order_are_read(parts: list[str], noise: bytes) -> None:
    scan_result = scan([Stream("body", iter([b"text\n", "".join(parts).encode(), noise, b"\n", OOM]))], MATCHER)
    assert scan_result.problems or shows_oom(scan_result)


def test_random_bytes_in_a_file_are_named_and_not_read(tmp_path: Path) -> None:
    (tmp_path / "noise.log").write_bytes(random.Random(1).randbytes(MEBIBYTE))
    result = read(tmp_path / "noise.log")
    assert not result.matches
    assert "noise.log" in result.problems[0]


def test_random_bytes_behind_a_page_of_text_do_no_harm() -> None:
    assert shows_oom(stream(b"step 1\n" * 10_000 + random.Random(2).randbytes(MEBIBYTE) + b"\n" + OOM))


def test_of_a_truncated_archive_what_there_is_is_read(tmp_path: Path) -> None:
    whole = gzip.compress(OOM + random.Random(3).randbytes(MEBIBYTE).hex().encode())
    (tmp_path / "train.log.gz").write_bytes(whole[: len(whole) // 2])
    result = read(tmp_path / "train.log.gz")
    assert shows_oom(result)
    assert "ends too early" in result.problems[0]


class Harmful:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_a_pickle_that_would_execute_is_refused(tmp_path: Path) -> None:
    harmful = {"pg_config": {}, "entries": [Harmful(tmp_path / "done")], "version": "2.4"}
    (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps(harmful, protocol=2))
    result = read(tmp_path / "nccl_trace_rank_0")
    assert not (tmp_path / "done").exists()
    assert "nccl_trace_rank_0" in result.problems[0]


def test_where_memory_is_shared_dumps_have_few_values() -> None:
    """Values take a hundred times the memory of the bytes that a client sends."""
    dump = b'{"pg_config":{},"pg_status":{},"record_id":1,' + b",".join(b'"%x":0' % n for n in range(900)) + b"}"
    limits = Limits(values=1000)
    assert not scan([Stream("dump", iter([dump]))], MATCHER, limits=limits).problems
    larger = dump.replace(b'"1":0', b'"1":[' + b"{}," * 100 + b"{}]")
    assert "more than 1,000 values" in scan([Stream("dump", iter([larger]))], MATCHER, limits=limits).problems[0]


def test_a_pipe_is_read_until_its_writer_ends(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")

    def write() -> None:
        with (tmp_path / "pipe").open("wb") as file:
            for _ in range(100):
                file.write(b"step\n" * 1000)
            file.write(OOM)

    writer = threading.Thread(target=write)
    writer.start()
    result = read(tmp_path / "pipe")
    writer.join(60)
    assert shows_oom(result)
    assert result.lines == 100_001


def test_a_log_that_grows_while_it_is_read_has_an_end(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_bytes(b"step\n" * MEBIBYTE + OOM)

    def grow(_: int) -> None:
        with log.open("ab") as file:
            file.write(b"later\n" * 10_000)

    scan_result = scan(find_sources([str(log)]).inputs, MATCHER, grow)
    assert shows_oom(scan_result)
    assert scan_result.lines == MEBIBYTE + 1


LONG = {
    "one character": b"x",
    "a literal": b"out of memory ",
    "many literals": b"NCCL WARN out of memory timed out exitcode failed CUDA error ",
    "a progress bar": b"\r 10%|# | 1/10 [00:01<00:09]",
    "colours without end": b"\x1b[",
    "brackets": b"[" * 50,
    "boxes": "│ ╰ ".encode(),
    "Chinese": "超时".encode(),
}


@pytest.mark.parametrize("unit", LONG.values(), ids=LONG.keys())
def test_megabytes_without_a_newline_are_read_to_their_end(unit: bytes) -> None:
    result = stream(unit * (3 * MEBIBYTE // len(unit)) + b" " * 5000 + OOM)
    assert result.lines == 1
    assert shows_oom(result)


def test_nul_bytes_around_a_log_hide_nothing(tmp_path: Path) -> None:
    for name, data in {"before": bytes(MEBIBYTE) + OOM, "behind": OOM + bytes(MEBIBYTE)}.items():
        (tmp_path / name).write_bytes(data)
        result = read(tmp_path / name)
        assert shows_oom(result) or result.problems, name


@pytest.mark.parametrize(
    "place", [b"step 1 \0 of 9\n", b"\0" * 3000, b"\0\1\2 step\n"], ids=["one", "a hole", "several"]
)
def test_a_nul_byte_inside_of_a_log_hides_nothing(place: bytes) -> None:
    assert shows_oom(stream(b"epoch 1 begins\n" * 100 + place + b"epoch 2 begins\n" * 10 + OOM))


def test_evidence_is_text_for_whoever_reads_it() -> None:
    """Not a terminal alone: a page shows it, and a model reads tags that people do not see."""
    result = stream(OOM.replace(b"Tried", "\u202e\U000e0041\x9b Tried".encode()))
    assert "\\u202e\\U000e0041\\x9b Tried" in result.failures[0].line.text


def test_a_link_to_a_busy_folder_does_not_push_the_log_out(tmp_path: Path) -> None:
    (tmp_path / "busy").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "busy")
    (tmp_path / "run" / "train.log").write_bytes(OOM)
    os.utime(tmp_path / "run" / "train.log", (1e9, 1e9))
    for number in range(5):
        (tmp_path / "busy" / f"{number}.log").write_text("step 1\n")
    sources = find_sources([str(tmp_path / "run")], most_files=3)
    assert [Path(source.name).name for source in sources.inputs].count("train.log") == 1
    assert len(sources.inputs) == 3


def test_a_folder_of_many_files_is_read(tmp_path: Path) -> None:
    for number in range(1500):
        (tmp_path / f"rank_{number}.log").write_bytes(b"step 1\n" + OOM * (number == 1203))
    result = read(tmp_path)
    assert shows_oom(result)
    assert {rank for match in result.matches if "out of memory" in match.text for rank in match.ranks} == {1203}
    assert result.sources == 1500


@pytest.mark.parametrize("group", range(GROUPS))
def test_no_signature_is_slow_on_its_own_repeats(group: int) -> None:
    slow = []
    for item in SIGNATURES[group::GROUPS]:
        unit = (
            max(pumped(item.pattern, item.sample), key=len).replace("\0", "\1").encode()
        )  # with NULs it would be binary
        result = stream(unit * (1 + LONG_LINE // len(unit)) + b"\n" + OOM)
        if result.problems or not shows_oom(result):
            slow.append((item.pattern, result.problems))
    assert not slow


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    code = (
        "import resource, sys\n"
        f"sys.path.insert(0, {str(CHECKOUT / 'tests' / 'faults')!r}); sys.path.insert(0, {str(CHECKOUT / 'tests')!r})\n"
        "from test_hostile_logs import MATCHER, OOM, Stream, scan\n"
        "def peak(megabytes):\n"
        "    block = (b'[rank1]: out of memory, failed with timed out\\n' + b'step 1\\n' * 20) * 1000\n"
        "    scan([Stream('body', (block for _ in range(megabytes * 5)))], MATCHER)\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "small = peak(4); large = peak(12)\n"
        "print(small, large); sys.exit(large > small + (2 << 10))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stdout + ended.stderr
