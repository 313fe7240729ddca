"""One document under `--json` and a true exit code, whatever standard input, output and error are, and after Ctrl-C."""

from __future__ import annotations

import array
import fcntl
import json
import os
import signal
import subprocess
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.console import GENEROUS_S, KB, ContentRoot, Kb, arm_directories, end, is_running, wait_for
from tests.support.warm_start import PIPE, Fork, start_warm

ENTRY = "checkpoint-save-allgather-timeout"
CHINESE = "Mixtral 保存 NCCL 超时"
SHORT = 4096  # bytes in a pipe
IMPORTS = (
    "kb.cli.main",
    "kb.cli.commands.diagnose",
    "kb.cli.commands.list_",
    "kb.cli.commands.verify",
    "kb.content.catalog",
)
LOG = b"RuntimeError: the thing broke: code 7\n"


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """`kb` as a shell starts it, which can close a stream."""
    return subprocess.run(["bash", "-c", f"{KB} {command}"], capture_output=True, text=True, timeout=GENEROUS_S)


def unread(pipe: int) -> int:
    """Bytes that nobody has read from a pipe yet."""
    count = array.array("i", [0])
    fcntl.ioctl(pipe, termios.FIONREAD, count)
    return count[0]


@contextmanager
def started(*args: str) -> Iterator[Fork]:
    """A `kb` under way, which ends with the block."""
    process = start_warm(*args, imports=IMPORTS, stdin=PIPE, stdout=PIPE, stderr=PIPE)
    try:
        yield process
    finally:
        end(process)
        for stream in (process.stdin, process.stdout, process.stderr):
            assert stream
            stream.close()


def interrupted_while_reading(*options: str) -> tuple[bytes, bytes]:
    """What `kb diagnose -` prints when Ctrl-C comes while it waits for more of its input."""
    with started("diagnose", "-", *options) as process:
        assert process.stdin
        pipe = process.stdin.fileno()
        os.write(pipe, LOG)
        wait_for(lambda: not unread(pipe), "the log to be read")
        process.send_signal(signal.SIGINT)
        result = process.communicate(GENEROUS_S)
        assert process.returncode == 130
        return result


def test_interrupted_it_is_130_with_one_document() -> None:
    out, err = interrupted_while_reading("--json")
    document = json.loads(out)
    assert (document["schema"], document["ok"]) == ("kb.diagnose.v1", False)
    assert document["error"] == {"type": "interrupted", "message": "interrupted", "hint": None}
    assert err == b""


def test_a_person_who_interrupts_is_told_nothing() -> None:
    assert interrupted_while_reading() == (b"", b"")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_verification_ends_its_arms_and_is_one_document(
    content: ContentRoot, tmp_path: Path, number: signal.Signals
) -> None:
    pid = tmp_path / "pid"
    waits = (
        f"Path({str(pid)!r} + '.new').write_text(str(os.getpid()))\nos.rename({str(pid)!r} + '.new', {str(pid)!r})\n"
    )
    content.incident("waits", waits + "time.sleep(600)", 'make(raised("the thing broke"), deadline_s=300)')
    with started("verify", "waits", "--json") as process:
        wait_for(pid.exists, "the arm to run")
        process.send_signal(number)
        out, err = process.communicate(GENEROUS_S)
    assert (process.returncode, json.loads(out)["error"]["type"]) == (130, "interrupted"), err
    assert not is_running(int(pid.read_text()))
    assert not arm_directories()


@pytest.mark.parametrize("command", ["list", "list --json", "show nosuch --json", "lint --schema"])
@pytest.mark.parametrize("stderr", ["", "2>&1"])
def test_a_full_disk_is_an_internal_error(command: str, stderr: str) -> None:
    ended = shell(f"{command} > /dev/full {stderr}")
    assert ended.returncode == 5
    text = "error: standard output cannot be written: No space left on device\nhint:  is the disk full?\n"
    assert ended.stderr == ("" if stderr else text)


@pytest.mark.parametrize("arguments, code", [("list --json", 0), ("show stochastic-nonsense", 2), ("verify fails", 1)])
def test_a_reader_that_leaves_early_changes_neither_exit_code_nor_stderr(
    content: ContentRoot, arguments: str, code: int
) -> None:
    content.incident("fails", "if is_fixed:\n    raise RuntimeError('the thing broke: code 7')")
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {KB} {arguments} | true"], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr
    assert "BrokenPipe" not in ended.stderr


def test_a_document_that_has_begun_is_followed_by_no_other() -> None:
    """The reader is slow and the pipe short: not all of the document is written when Ctrl-C comes."""
    with started("list", "--json") as process:
        assert process.stdout
        pipe = process.stdout.fileno()
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, SHORT)
        wait_for(lambda: unread(pipe) == SHORT, "the pipe to be full")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(GENEROUS_S)
    assert process.returncode == 130, err
    assert out.count(b'"schema"') == 1
    assert b"interrupted" not in out


def test_an_argument_that_is_no_text_is_asked_as_standard_input_is(kb: Kb, kb_process: Kb) -> None:
    text = b"\xff ALLGATHER timeout save"
    answer = kb("search", "-", "--json", stdin=text).json
    for form in ("utf-8:strict", "utf-8:surrogateescape"):
        typed = kb_process("search", os.fsdecode(text), "--json", PYTHONIOENCODING=form)
        assert typed.code == 0, typed.out
        assert typed.json == answer


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "gbk"])
def test_a_document_is_the_same_where_stdout_is_not_utf_8(kb: Kb, kb_process: Kb, encoding: str) -> None:
    ended = kb_process("search", CHINESE, "--json", PYTHONIOENCODING=encoding)
    assert ended.code == 0, ended.out
    assert ended.out.isascii()
    assert ended.json == kb("search", CHINESE, "--json").json


def test_what_a_terminal_has_no_characters_for_is_replaced(kb_process: Kb) -> None:
    for command in (("search", CHINESE), ("show", ENTRY), ("show", ENTRY, "--lang", "zh", "--markdown"), ("list",)):
        ended = kb_process(*command, PYTHONIOENCODING="ascii")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.isascii()
        assert command[0] != "search" or f"kb verify {ENTRY}" in ended.out


@pytest.mark.parametrize("command", ["search -", "diagnose -", "redact", "redact -", "mcp"])
def test_closed_standard_input_is_a_usage_error(command: str) -> None:
    ended = shell(f"{command} <&-")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: standard input ")
    assert "\nhint:  " in ended.stderr


@pytest.mark.parametrize("command", ["search", "diagnose"])
def test_closed_standard_input_is_one_document(command: str) -> None:
    ended = shell(f"{command} - --json <&-")
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["error"]["type"] == "usage-error"


@pytest.mark.parametrize(("command", "code"), [("list", 0), ("list --json", 0), ("show nosuch --json", 2), ("env", 0)])
def test_closed_standard_output_changes_no_exit_code(command: str, code: int) -> None:
    ended = shell(f"{command} >&-")
    assert ended.returncode == code
    assert "Traceback" not in ended.stderr


def test_closed_standard_error_sends_nothing_to_stdout(content: ContentRoot) -> None:
    (content.path / "entries" / "unreadable.md").write_text("no entry\n")
    assert "unreadable.md" in shell("search ALLGATHER timeout save --json").stderr
    ended = shell("search ALLGATHER timeout save --json 2>&-")
    assert ended.returncode == 0
    assert json.loads(ended.stdout)["hits"]
