"""Long work shows on a terminal that it goes on, and nowhere else."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time

from tests.support.console import GENEROUS_S, KB, Kb, end

LINE = b"a line of a log\n"


def drawn_by(*arguments: str, is_fed: bool = False) -> tuple[bytes, bytes]:
    """What a command draws on a terminal as stderr, and its stdout. `is_fed`: its stdin gets lines until it draws."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [str(KB), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=follower, bufsize=0
    )
    os.close(follower)
    try:
        assert process.stdin
        end_at = time.monotonic() + GENEROUS_S
        while is_fed and time.monotonic() < end_at:
            process.stdin.write(LINE)
            if select.select([leader], [], [], 0.25)[0]:
                break
        out, _ = process.communicate(timeout=120)
    finally:
        end(process)
    drawn = b""
    try:
        while data := os.read(leader, 65536):
            drawn += data
    except OSError:  # the end, on Linux
        pass
    os.close(leader)
    return drawn, out


def test_a_long_redaction_shows_how_much_was_read_and_leaves_nothing() -> None:
    drawn, out = drawn_by("redact", "-", is_fed=True)
    assert out == LINE * (len(out) // len(LINE)) != b""
    assert b"read 0 MB" in drawn
    assert drawn.endswith(b"\r\x1b[K")


def test_building_the_index_shows_that_it_goes_on() -> None:
    drawn, out = drawn_by("index", "--force")
    assert b"building the search index" in drawn
    assert drawn.endswith(b"\r\x1b[K")
    assert b"entries in" in out


def test_nothing_is_drawn_into_a_file(kb: Kb) -> None:
    assert "\x1b" not in kb("index", "--force").err
