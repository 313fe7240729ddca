"""Long text through a pager on a terminal, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.console import GENEROUS_S, KB, Kb, end
from tests.support.warm_start import start_warm

ENTRY = "checkpoint-save-allgather-timeout"
MARK = "through a pager"
IMPORTS = (
    "kb.cli.main",
    "kb.cli.commands.list_",
    "kb.cli.commands.search",
    "kb.cli.commands.show",
    "kb.content.catalog",
)


@pytest.fixture(autouse=True)
def no_pager_of_the_developer(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("PAGER", "KB_PAGER"):
        monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def pager(tmp_path: Path) -> Path:
    """A pager that marks what it shows."""
    path = tmp_path / "pager"
    path.write_text(f"#!/bin/sh\necho '{MARK}' LESS=$LESS\nexec cat\n")
    path.chmod(0o755)
    return path


@contextmanager
def terminal(rows: int, columns: int) -> Iterator[tuple[int, int]]:
    """Both ends of a terminal of this size: ours, and that of a program, which is to be closed here when it runs."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    try:
        yield ours, its
    finally:
        os.close(ours)


def variables(**env: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "LESS")}
    return {**inherited, "TERM": "xterm", **env}


def shown(*args: str, rows: int = 24, columns: int = 80, **env: str) -> str:
    """All that a terminal of this size shows of a command that succeeds."""
    with terminal(rows, columns) as (ours, its):
        process = start_warm(*args, imports=IMPORTS, env=variables(**env), stdin=its, stdout=its, stderr=its)
        os.close(its)
        try:
            output = b"".join(iter(lambda: read(ours), b""))
            assert process.wait(GENEROUS_S) == 0, output
        finally:
            end(process)
    return output.decode().replace("\r\n", "\n")


def read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # as Linux ends a terminal that nobody writes to any more
        return b""


@pytest.mark.parametrize("variable", ["PAGER", "KB_PAGER"])
def test_what_is_longer_than_the_screen_is_paged(pager: Path, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, str(pager))
    text = shown("show", ENTRY)
    assert text.startswith(f"{MARK} LESS=FRX\n# All-gather times out")
    assert text.rstrip().endswith("references.")
    assert shown("list").startswith(MARK)


def test_the_pager_of_kb_comes_before_that_of_all(pager: Path) -> None:
    assert shown("show", ENTRY, KB_PAGER=str(pager), PAGER="cat").startswith(MARK)
    assert MARK not in shown("show", ENTRY, KB_PAGER="cat", PAGER=str(pager))


@pytest.mark.parametrize("setting", ["", "cat", "/does/not/exist -x", "unbalanced '"])
def test_without_a_pager_it_is_printed(setting: str) -> None:
    assert shown("show", ENTRY, PAGER=setting).startswith("# All-gather times out")


def test_what_fits_is_not_paged_nor_what_was_asked_for_without(pager: Path) -> None:
    assert MARK not in shown("show", ENTRY, rows=200, PAGER=str(pager))
    assert MARK not in shown("show", ENTRY, "--no-pager", PAGER=str(pager))
    assert MARK not in shown("show", ENTRY, PAGER=str(pager), TERM="dumb")


def test_a_pipe_is_not_paged(kb_process: Kb, pager: Path) -> None:
    assert MARK not in kb_process("show", ENTRY, "--all", PAGER=str(pager)).out


def test_who_leaves_the_pager_early_sees_no_error() -> None:
    assert shown("show", ENTRY, "--all", PAGER="true") == ""
    assert len(shown("show", ENTRY, "--all", PAGER="head -n 3").splitlines()) == 3


def test_less_keeps_running_after_ctrl_c_and_ends_with_q() -> None:
    with terminal(24, 80) as (ours, its):
        process = subprocess.Popen(
            [KB, "show", ENTRY, "--all"],
            stdin=its,
            stdout=its,
            stderr=its,
            env=variables(PAGER="less"),
            start_new_session=True,
        )
        os.close(its)
        try:
            seen = b""
            while b"Symptom" not in seen:
                seen += read(ours)
            os.killpg(process.pid, signal.SIGINT)
            time.sleep(0.5)  # time in which it could end; that it does not is what is asserted
            assert process.poll() is None
            rest = b""
            while process.poll() is None:
                os.write(ours, b"q")  # again and again: less drops what was typed before it saw the signal
                while select.select([ours], [], [], 0.2)[0] and (more := read(ours)):
                    rest += more
            assert process.returncode == 0
        finally:
            end(process)
    assert b"Traceback" not in seen + rest


def test_code_is_whole_on_a_narrow_terminal() -> None:
    """Not wrapped by kb: a terminal joins again what it broke itself."""
    for columns in (40, 80, 120):
        text = shown("show", ENTRY, "--section", "fix", columns=columns, rows=500)
        line = "from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict"
        assert f"\n{line}\n" in text


@pytest.mark.parametrize("columns", [40, 80, 120])
def test_titles_and_ids_of_lists_are_not_broken(kb: Kb, columns: int) -> None:
    for command in (("list",), ("search", "ALLGATHER timeout save", "--limit", "20")):
        document = kb(*command, "--json").json
        lines = shown(*command, columns=columns, rows=5000).splitlines()
        words = " ".join(lines).split()
        for entry in document.get("entries") or document["hits"]:
            assert entry["id"] in words
            assert " ".join(entry["title"].split()) in " ".join(words)
        assert columns < 80 or all(len(line) <= columns for line in lines if "http" not in line)
