"""The wheel of the checkout, and environments with it, installed by uv in a tenth of the time of pip."""

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
CONSTRAINTS = CHECKOUT / "constraints.txt"


def uv(cache: Path, *arguments: str | Path, cwd: Path, **env: str | Path) -> None:
    """Run uv with a cache of downloads."""
    places = {"UV_CACHE_DIR": cache, "UV_PYTHON_DOWNLOADS": "never", **env}
    ended = subprocess.run(
        [UV, "--quiet", *arguments],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in places.items()}},
        timeout=INSTALL_S,
    )
    assert ended.returncode == 0, ended.stderr


def build_wheel(folder: Path, cache: Path) -> None:
    """Build the wheel into a folder, from a checkout where an earlier build left an entry that no longer exists."""
    earlier = CHECKOUT / "build" / "lib" / "kb" / "entries"
    earlier.mkdir(parents=True, exist_ok=True)
    (earlier / "removed-since.md").touch()
    uv(cache, "build", "--wheel", "--python", sys.executable, "--out-dir", folder, CHECKOUT, cwd=folder.parent)


def install_wheel(folder: Path, cache: Path, wheel: Path) -> None:
    """Create an environment with the wheel, its base dependencies, and pip, like the module venv."""
    uv(cache, "venv", "--python", sys.executable, folder, cwd=folder.parent)
    install = ("pip", "install", "--python", folder / "bin" / "python")
    uv(cache, *install, "--constraints", CONSTRAINTS, "pip", wheel, cwd=folder.parent)


@dataclass(frozen=True)
class UvTool:
    """`uv tool install` in a new home. uv does not compile modules; Python does so at the first start."""

    home: Path
    cache: Path

    def install(self, *arguments: str | Path) -> None:
        self._run("tool", "install", "--constraints", CONSTRAINTS, *arguments)

    def follow(self, hint: str) -> None:
        """Run a command that kb printed."""
        program, *arguments = shlex.split(hint)
        assert program == UV.name
        self._run(*arguments)

    def kb(self, *args: str | Path, stdin: str = "", **env: str) -> Ended:
        command = [self.home / "bin" / "kb", *args]
        ended = subprocess.run(
            command, input=stdin, capture_output=True, text=True, cwd=self.home, env=os.environ | env, timeout=180
        )
        return Ended(ended.returncode, ended.stdout, ended.stderr)

    def _run(self, *arguments: str | Path) -> None:
        tools, commands = self.home / "tools", self.home / "bin"
        uv(self.cache, *arguments, cwd=self.home, UV_TOOL_DIR=tools, UV_TOOL_BIN_DIR=commands)
