"""The index of the built-in entries that a wheel and a checkout bring along, so that a first search builds nothing.

`setup.py` makes it wherever kb is installed from its sources; `python -m kb.search.built_in_index` makes it again. It
is one segment. Entries that have changed since are indexed in the user's cache. It is as trusted as the code beside it.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from kb.content import roots
from kb.search.index_cache import BUILT_IN_SEGMENT


def build(directory: Path = BUILT_IN_SEGMENT) -> int:
    """Index the built-in entries into `directory`, in place of what is there; returns how many they are.

    Raises the `ContentError` of an entry that cannot be indexed.
    """
    from kb.content.catalog import load_catalog
    from kb.search.index_writer import write_files

    catalog = load_catalog((roots.builtin_root(),))
    for problem in catalog.problems:
        raise problem
    count = len(catalog)
    building = Path(tempfile.mkdtemp(prefix="index-", dir=directory.parent))
    try:
        write_files(building, dict(catalog.entries), catalog.entries.keys(), print)
        building.chmod(0o755)
        shutil.rmtree(directory, ignore_errors=True)
        building.rename(directory)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise
    return count


if __name__ == "__main__":
    print(f"{build()} entries in {BUILT_IN_SEGMENT}")  # noqa: T201
