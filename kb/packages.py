"""What the checks of probes read about packages in the reader's training interpreter.

Standard library and Python 3.9 only. Nothing here raises; what cannot be read is empty, and the check says `unknown`.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Tuple  # works on Python 3.9


def version(package: str) -> str:
    """The version in the package's metadata, "2.13.0+cu128"; "" if it is not installed or its metadata is damaged."""
    try:
        return metadata.version(package) or ""  # None if pip left a folder without metadata
    except Exception:  # damaged metadata can raise anything: KeyError, TypeError, ValueError, OSError
        return ""


def release(package: str) -> Tuple[int, ...]:
    """The two or three numbers that the package's version begins with: (2, 13, 0). Empty if there are none."""
    return numbers(version(package))


def numbers(text: str) -> Tuple[int, ...]:
    """The numbers of a version. A pre-release or development build, 2.6.0a0+nv25.1, has those of its release."""
    match = re.match(r"\d{1,9}(\.\d{1,9}){1,2}", text, re.ASCII)
    return tuple(map(int, match.group().split("."))) if match else ()
