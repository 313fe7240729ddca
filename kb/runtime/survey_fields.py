"""Reads values, any of which may be missing, and records the reasons.

It is for machines on which something is broken, so it assumes nothing. `kb.runtime.machine_survey` imports this file in
the reader's interpreter: standard library and Python 3.9 only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

LONGEST_REASON = 2000  # characters
UNLIMITED = "unlimited"  # the value of a limit that is not set


class Unknown(Exception):
    """A value that cannot be read; the message says why."""


class Reader:
    """Reads values one by one, so that a failure costs only its own value.

    A value that cannot be read is None; `reasons` says why, under the value's dotted path.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}

    def values(self, path: str, sources: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """The value of each source, under the source's name."""
        return {name: self.value(f"{path}.{name}", source) for name, source in sources.items()}

    def value(self, path: str, source: Callable[[], Any]) -> Any:
        try:
            return source()
        except Unknown as error:
            self.reasons[path] = str(error)
        except OSError as error:
            self.reasons[path] = (error.strerror or str(error)).lower()
        except Exception as error:  # a broken package or an odd kernel can raise anything
            self.reasons[path] = describe(error)
        return None


def describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:LONGEST_REASON]


def read_text(path: Path) -> str:
    """The content of a small file, such as one in /proc, without surrounding white space."""
    return path.read_text(errors="replace").strip()
