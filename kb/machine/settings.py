"""The settings of NCCL, torch and OpenMP in variables and files, with likely secrets removed."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Callable, Mapping
from pathlib import Path

VARIABLES = ("NCCL_", "TORCH_", "PYTORCH_", "TORCHELASTIC_", "CUDA_", "NVIDIA_", "GLOO_", "OMP_")
SECRET_NAME = re.compile("TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
SECRET_VALUE = re.compile(r"://[^/\s]*@")  # a URL with a user in it
REDACTED = "(redacted)"
LONGEST_FILE = 16_384  # characters


def variables() -> dict[str, str]:
    chosen = {name: value for name, value in sorted(os.environ.items()) if name.startswith(VARIABLES)}
    return {name: _without_secret(name, value) for name, value in chosen.items()}


def nccl_files() -> Mapping[str, Callable[[], str]]:
    """Sources of the files that NCCL reads: the system's, and the one in `NCCL_CONF_FILE`, else the user's."""
    given = os.environ.get("NCCL_CONF_FILE")
    return {
        "/etc/nccl.conf": lambda: _configuration(Path("/etc/nccl.conf")),
        given or "~/.nccl.conf": lambda: _configuration(Path(given) if given else _home() / ".nccl.conf"),
    }


def _home() -> Path:
    """The home directory from the user database, which NCCL uses, not from `HOME`."""
    return Path(pwd.getpwuid(os.getuid()).pw_dir)


def _configuration(path: Path) -> str:
    with path.open(errors="replace") as file:
        lines = file.read(LONGEST_FILE).splitlines()
    return "\n".join(_without_secret_line(line) for line in lines)


def _without_secret_line(line: str) -> str:
    name, equals, value = line.partition("=")
    return f"{name}={_without_secret(name, value)}" if equals else line


def _without_secret(name: str, value: str) -> str:
    return REDACTED if SECRET_NAME.search(name) or SECRET_VALUE.search(value) else value
