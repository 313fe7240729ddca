"""Standard input, as bytes."""

from __future__ import annotations

import sys
from typing import BinaryIO

from kb.errors import UsageError


def stdin() -> BinaryIO:
    """Standard input in binary. Raises `UsageError` if it was closed when kb started."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, so `-` has nothing to read", "name a file, or pipe a log into kb")
    return sys.stdin.buffer
