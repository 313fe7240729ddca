"""Standard input, as bytes."""

from __future__ import annotations

import sys
from typing import BinaryIO

from kb.errors import UsageError


def stdin() -> BinaryIO:
    """Raises `UsageError` when kb was started with it closed."""
    if sys.stdin is None:
        raise UsageError("standard input is closed, so `-` has nothing to read", "name a file, or pipe a log into kb")
    return sys.stdin.buffer
