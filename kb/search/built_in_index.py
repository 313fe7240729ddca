"""Builds the index of the built-in entries that a wheel or checkout contains, so that a first search builds nothing.

`setup.py` runs it when kb is installed from source; `python -m kb.search.built_in_index` rebuilds the index. It is one
segment. Entries that have changed since are indexed in the user's cache. It is as trusted as the code next to it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kb.content import roots
from kb.search.generation import BUILT_IN_SEGMENT
from kb.search.index_writer import write_segment


def build(directory: Path = BUILT_IN_SEGMENT) -> int:
    """Index the built-in entries into `directory`, replacing what is there. Returns the number of entries.

    Raises `ValueError` for an entry that cannot be read.
    """
    root = roots.builtin_root()
    files = [(path, root.name) for path in root.entry_files()]
    building = Path(tempfile.mkdtemp(prefix="index-", dir=directory.parent))
    try:
        problems = write_segment(building, files, frozenset(path.stem for path, _ in files))
        if problems:
            raise ValueError("; ".join(problems.values()))
        for lock in building.glob("*_WRITELOCK"):
            lock.unlink()
        building.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        building.rename(directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return len(files)


if __name__ == "__main__":
    print(f"{build()} entries in {BUILT_IN_SEGMENT}")  # noqa: T201
