"""Whoosh compiled at its first import, as after an installer that compiles nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.console import CHECKOUT

IMPORTS = "import kb.search.index, kb.search.index_writer, whoosh.analysis; print(whoosh.__version__)"


def test_no_warning_shows(tmp_path: Path) -> None:
    empty_cache = ["-B", "-X", f"pycache_prefix={tmp_path}"]
    command = [sys.executable, *empty_cache, "-W", "error::SyntaxWarning", "-c", IMPORTS]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=120)
    assert (ended.stdout, ended.stderr) == ("(2, 7, 4)\n", "")


def test_the_same_mistakes_elsewhere_are_reported() -> None:
    mistake = "compile('1 is 0', '/probes/whoosh_like.py', 'exec')"
    command = [sys.executable, "-W", "default", "-c", f"import kb.search\n{mistake}"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT, timeout=120)
    assert 'SyntaxWarning: "is" with' in ended.stderr
