"""What others wrote is shown as text: no log, file name, entry or exception controls the reader's terminal."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.support.console import GENEROUS_S, KB, ContentRoot, Kb

pytestmark = pytest.mark.usefixtures("few_entries")

HOSTILE = "\x1bc \x1b(0 \x9b31m \x08\x07 \u202eabc \U000e0041 \x1b]5\x1b[0m2;c;aGk=\x07 \x1b\x1b[0m\x1b[0m]52;c;aGk=\x07 \x1b[8m"
COLOR = re.compile(r"\x1b\[[0-9;]*m")
HAZARD = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e0fff]")


def assert_is_text(output: str) -> None:
    assert not HAZARD.search(COLOR.sub("", output)), ascii(output)
    assert "\x1b[8m" not in output, "it is hidden"


@pytest.mark.parametrize("has_color", [False, True])
def test_a_log_and_its_name_are_shown_as_text(kb: Kb, tmp_path: Path, has_color: bool) -> None:
    folder = tmp_path / "\x1b]0;owned\x07"
    folder.mkdir()
    (folder / "a\x1b[2J\u202e.log").write_text(f"[rank0]: RuntimeError: boom {HOSTILE}\n")
    ended = kb("diagnose", folder, **({"FORCE_COLOR": "1"} if has_color else {}))
    assert "boom" in ended.out
    assert_is_text(ended.out + ended.err)
    assert ("\x1b" in ended.out) is has_color


def test_a_message_about_a_file_is_shown_as_text(kb: Kb) -> None:
    for command in ("diagnose", "lint", "redact"):
        assert_is_text(kb(command, f"none{HOSTILE}").err)


def test_a_document_has_the_characters_and_shows_none_of_them(kb: Kb, tmp_path: Path) -> None:
    name = "a\x9b31m\u202e.log"
    (tmp_path / name).write_text("RuntimeError: boom\n")
    ended = kb("diagnose", name, "--json", cwd=tmp_path)
    assert_is_text(ended.out)
    assert json.loads(ended.out)["schema"] == "kb.diagnose.v1"


@pytest.mark.parametrize(
    "args", [("list",), ("search", "thing called"), ("show", "evil"), ("show", "evil", "--markdown")]
)
def test_an_entry_is_shown_as_text(kb: Kb, content: ContentRoot, args: tuple[str, ...]) -> None:
    content.entry("evil", has_probe=False, title='"The thing called \\e]0;owned\\a \\x9B2J \\u202E"', symptom=HOSTILE)
    ended = kb(*args)
    assert ended.code == 0
    assert_is_text(ended.out + ended.err)


def test_where_neither_stream_can_be_written_the_exit_code_is_true(tmp_path: Path) -> None:
    for args, code in ((["list"], 5), (["show", "none-such"], 2), (["--version"], 5)):
        with open("/dev/full", "w") as full:
            assert (
                subprocess.run([KB, *args], stdout=full, stderr=full, cwd=tmp_path, timeout=GENEROUS_S).returncode
                == code
            )
