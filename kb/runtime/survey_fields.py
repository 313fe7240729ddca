"""Reads values of which any may be missing, and keeps the reasons.

For machines on which something is broken: nothing is assumed to work. `kb.runtime.machine_survey` brings this file
along into the reader's interpreter, so it stands on the standard library and Python 3.9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LONGEST_REASON = 2000  # characters
UNLIMITED = "unlimited"  # the value of a limit that is not set


class Unknown(Exception):
    """A value that cannot be had; the message says why."""


class Reader:
    """Reads values one by one, so that one failing costs no other.

    A value that cannot be had is None; `reasons` says why, under the value's dotted path.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def values(self, path: str, sources: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Each source's value under the source's name."""
        return {name: self.value(f"{path}.{name}", source) for name, source in sources.items()}

    def value(self, path: str, source: Callable[[], Any]) -> Any:
        try:
            return source()
        except Unknown as error:
            self.reasons[path] = str(error)
        except OSError as error:
            self.reasons[path] = (error.strerror or str(error)).lower()
        except Exception as error:  # whatever else a broken package or an odd kernel leads to
            self.reasons[path] = describe(error)
        return None


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def text(path: Path) -> str:
    """A small file, as the kernel offers them, without white space around it."""
    return path.read_text(errors="replace").strip()
