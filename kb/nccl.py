"""What several probes read about NCCL: its release, its library, and settings with their source.

Runs in the reader's training interpreter: standard library and Python 3.9 only. What cannot be read is empty.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from typing import Any, Iterator, Tuple  # works on Python 3.9

from kb.packages import release

NCCL_PACKAGES = ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nccl-cu11")


def nccl_release() -> Tuple[int, ...]:
    """The release of the NCCL that pip installed for torch; empty if there is none; torch may contain its own."""
    return next(filter(None, map(release, NCCL_PACKAGES)), ())


def nccl_libraries() -> Iterator[Tuple[Any, int]]:
    """Yield each libnccl that can be loaded (pip's before the linker's) and its version as a number: 22703."""
    spec = importlib.util.find_spec("nvidia")
    places = [Path(place) / "nccl/lib/libnccl.so.2" for place in (spec and spec.submodule_search_locations) or []]
    for place in [str(place) for place in places if place.exists()] + ["libnccl.so.2"]:
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        version = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(version))
        yield library, version.value


def nccl_setting(name: str) -> Tuple[str, str]:
    """The value of a setting, and the file or "environment" that has it; the value is "" if nothing sets it.

    The environment wins, even with an empty variable; then $NCCL_CONF_FILE, else ~/.nccl.conf; then /etc/nccl.conf
    (src/misc/param.cc of NCCL).
    """
    if name in os.environ:
        return os.environ[name], "environment"
    for path in (os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf"):
        try:
            lines = Path(path).read_text(errors="replace").splitlines()
        except (OSError, ValueError):
            continue
        for key, _, value in (line.partition("=") for line in lines):
            if key.strip() == name:
                return value.strip(), path
    return "", ""
