"""Where kb keeps what it makes: the directories of the XDG Base Directory Specification, on every system."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """For what can be made again: the search index."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kb"


def data_home() -> Path:
    """For what cannot: the store of reports."""
    return Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "kb"
