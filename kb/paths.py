"""A user's directories, by the XDG Base Directory Specification on every system (docs/decisions/0023)."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """The directory for what can be rebuilt: the search index."""
    return _base("XDG_CACHE_HOME", ".cache") / "kb"


def data_home() -> Path:
    """The directory for what cannot be rebuilt: reports, the outbox, unexplained excerpts."""
    return _base("XDG_DATA_HOME", ".local/share") / "kb"


def _base(variable: str, default: str) -> Path:
    """The base directory. A relative value is ignored, as the specification demands: it would differ by folder."""
    value = Path(os.environ.get(variable, ""))
    return value if value.is_absolute() else Path.home() / default
