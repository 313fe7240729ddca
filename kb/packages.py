"""What the checks of probes read of the packages that are installed in the reader's training interpreter.

Standard library and Python 3.9. Nothing here raises; what cannot be read is empty, and the check says `unknown`.
"""

from __future__ import annotations

import re
from importlib import metadata
from typing import Tuple  # Python 3.9 reads these


def version(package: str) -> str:
    """As its metadata have it, "2.13.0+cu128"; empty where it is not installed or its metadata are damaged."""
    try:
        return metadata.version(package) or ""  # None where pip left a folder without metadata
    except Exception:  # damaged metadata raise what they like: KeyError, TypeError, ValueError, OSError
        return ""


def release(package: str) -> Tuple[int, ...]:
    """The two or three numbers that its version begins with: (2, 13, 0). Empty where there are none."""
    return numbers(version(package))


def numbers(text: str) -> Tuple[int, ...]:
    """Of a version; of a candidate or a development build, 2.6.0a0+nv25.1, those of the release that it leads to."""
    match = re.match(r"\d{1,9}(\.\d{1,9}){1,2}", text, re.ASCII)
    return tuple(map(int, match.group().split("."))) if match else ()
