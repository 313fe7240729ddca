"""kb.machine.interpreter: a training interpreter that answers, and those that print, die, hang or are not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from kb.machine import interpreter
from kb.runtime.survey_fields import Reader

PYTHON = Path(sys.executable)


def ask(python: Path, import_torch: bool = False) -> tuple[dict[str, Any] | None, dict[str, str]]:
    reader = Reader()
    with interpreter.survey(python, import_torch) as running:
        result = reader.value("python", lambda: interpreter.read_survey(reader, python, running, import_torch))
    return result, reader.reasons


def script(tmp_path: Path, text: str) -> Path:
    """An interpreter that is a shell script."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    folder = tmp_path / "site" / "torch"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(text)
    (folder / "version.py").write_text("__version__ = '2.6.0'\ncuda = '12.4'\n")
    monkeypatch.setenv("PYTHONPATH", str(folder.parent))
    return folder


def test_asks_the_interpreter_it_is_given(tmp_path: Path) -> None:
    result, reasons = ask(script(tmp_path, f'exec {sys.executable} -S "$@"'))
    assert result is not None
    assert result["packages"] == {}
    assert reasons["python.torch"] == "torch is not installed"


def test_an_answer_may_follow_what_a_site_prints(tmp_path: Path) -> None:
    result, _ = ask(script(tmp_path, f'echo welcome to the cluster; exec {sys.executable} "$@"'))
    assert result is not None
    assert result["version"] == sys.version.split()[0]


@pytest.mark.parametrize("import_torch", [False, True])
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("echo File >&2; echo 'SyntaxError: annotations' >&2; exit 1", "exit code 1: SyntaxError: annotations"),
        ("echo hello", r"it answered something else: 'hello\n'"),
        ("echo '[]'", r"it answered something else: '[]\n'"),
        ("echo 42", r"it answered something else: '42\n'"),
        ("true", "it answered something else: ''"),
        ("kill -ILL $$", "died of SIGILL"),
    ],
)
def test_an_interpreter_that_does_not_answer_is_null_with_a_reason(
    tmp_path: Path, text: str, reason: str, import_torch: bool
) -> None:
    assert ask(script(tmp_path, text), import_torch) == (None, {"python": reason})


def test_an_interpreter_that_is_not_there_is_null_with_a_reason(tmp_path: Path) -> None:
    result, reasons = ask(tmp_path / "python")
    assert result is None
    assert "cannot be started" in reasons["python"]


def test_a_torch_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "raise OSError('libnccl.so.2: cannot open shared object file')")
    result, _ = ask(PYTHON, import_torch=True)
    assert result is not None
    assert result["torch"]["cuda"] == "12.4"
    assert result["torch_import"]["error"] == "OSError: libnccl.so.2: cannot open shared object file"


def test_a_torch_that_kills_its_process_costs_the_import_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_torch(tmp_path, monkeypatch, "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    result, reasons = ask(PYTHON, import_torch=True)
    assert result is not None
    assert result["torch"]["version"] == "2.6.0"
    assert result["torch_import"] is None
    assert reasons["python.torch_import"] == "importing torch: died of SIGSEGV"


def test_a_torch_that_hangs_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(interpreter.SURVEY_S, True, 10.0)
    folder = fake_torch(tmp_path, monkeypatch, "import time\ntime.sleep(1000)\n")
    result, reasons = ask(PYTHON, import_torch=True)
    assert result is not None
    assert result["packages"]
    assert "did not end within 10 s" in reasons["python.torch_import"]
    assert f'it was at File "{folder}/__init__.py", line 2' in reasons["python.torch_import"]
