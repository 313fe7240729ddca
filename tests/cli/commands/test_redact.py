"""`kb redact` as a filter."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.support.console import GENEROUS_S, KB, Kb

LOG = b"[rank0]: at 10.1.2.3 \xff\r\npassword: hunter2\n[rank0]: at 10.1.2.3 and 127.0.0.1"
REDACTED = b"[rank0]: at <ip-1> \xff\r\npassword: <secret-1>\n[rank0]: at <ip-1> and 127.0.0.1"


def filtered(data: bytes, *args: str | Path) -> bytes:
    return subprocess.run([KB, "redact", *args], input=data, capture_output=True, check=True, timeout=GENEROUS_S).stdout


def test_standard_input_comes_out_redacted_byte_by_byte_otherwise() -> None:
    assert filtered(LOG) == REDACTED
    assert filtered(LOG, "-") == REDACTED
    assert filtered(REDACTED) == REDACTED
    assert filtered(b"") == b""


def test_a_file_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_bytes(LOG)
    assert filtered(b"", path) == REDACTED
    assert path.read_bytes() == LOG


def test_a_line_comes_out_before_the_input_ends() -> None:
    with subprocess.Popen([KB, "redact"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"at 10.1.2.3\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"at <ip-1>\n"
        process.stdin.close()
        assert process.wait(GENEROUS_S) == 0


def test_a_reader_that_leaves_is_no_error() -> None:
    with subprocess.Popen(
        [KB, "redact"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin
        assert process.stdout
        assert process.stderr
        process.stdin.write(b"at 10.1.2.3\n")
        process.stdin.flush()
        assert process.stdout.readline() == b"at <ip-1>\n"
        process.stdout.close()
        process.stdin.write(b"more\n")
        process.stdin.close()
        assert process.wait(GENEROUS_S) == 0
        assert process.stderr.read() == b""


def test_megabytes_without_a_line_end_come_through() -> None:
    quiet = b"step 17 is fine, " * 50_000
    line = (
        b"hf_Zq7abcdefghijklmnopqrstuvwxyz0123 " + quiet + b"at 10.1.2.3 " + quiet + b"at 10.1.2.3 " + quiet + b"gpu-03"
    )
    redacted = filtered(line)
    assert redacted == b"<token-1> " + quiet + b"at <ip-1> " + quiet + b"at <ip-1> " + quiet + b"<host-1>"


def test_what_cannot_be_read_is_a_usage_error(kb: Kb, tmp_path: Path) -> None:
    for wrong in (tmp_path / "none.log", tmp_path):
        ended = kb("redact", wrong)
        assert (ended.code, ended.out) == (2, "")
        assert str(wrong) in ended.err
