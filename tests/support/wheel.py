"""The wheel of the checkout, and kb installed from it as the README says, with uv."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.support.console import CHECKOUT, Ended

INSTALL_S = 900
UV = Path(sys.executable).with_name("uv")


def build_wheel(folder: Path) -> None:
    """Into a folder, from a checkout in which an earlier build left an entry that is not there any more."""
    earlier = CHECKOUT / "build" / "lib" / "kb" / "entries"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "removed-since.md").touch()
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(CHECKOUT)]
    subprocess.run(command, check=True, timeout=INSTALL_S, cwd=folder.parent)


@dataclass(frozen=True)
class UvTool:
    """`uv tool install` in a home of its own. uv compiles nothing: Python does so at the first start."""

    home: Path
    cache: Path

    def install(self, *arguments: str | Path) -> None:
        self._run([UV, "tool", "install", "--constraints", CHECKOUT / "constraints.txt", *arguments])

    def follow(self, hint: str) -> None:
        """Run a command that kb printed."""
        program, *arguments = shlex.split(hint)
        assert program == UV.name
        self._run([UV, *arguments])

    def kb(self, *args: str | Path, stdin: str = "", **env: str) -> Ended:
        command = [self.home / "bin" / "kb", *args]
        ended = subprocess.run(
            command, input=stdin, capture_output=True, text=True, cwd=self.home, env=os.environ | env, timeout=180
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _run(self, command: list[str | Path]) -> None:
        places = {
            "UV_CACHE_DIR": self.cache,
            "UV_TOOL_DIR": self.home / "tools",
            "UV_TOOL_BIN_DIR": self.home / "bin",
            "UV_PYTHON_DOWNLOADS": "never",
        }
        env = {**os.environ, **{name: str(value) for name, value in places.items()}}
        ended = subprocess.run(command, capture_output=True, text=True, cwd=self.home, env=env, timeout=INSTALL_S)
        assert ended.returncode == 0, ended.stderr
