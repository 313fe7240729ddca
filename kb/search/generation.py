"""A generation of the index on disk: a pointer to the directory of its tables, which name its segments.

It is written into new directories and becomes current when the pointer is renamed. A reader holds one generation.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from kb.search.fingerprints import FileState
from kb.search.index import Index
from kb.search.segment import Segment

BUILT_IN = "built-in"
BUILT_IN_SEGMENT = Path(__file__).with_name("built_in_index")  # made by `kb.search.built_in_index`
POINTER, TABLES, FILES = "current.json", "tables.json", "files.json"

Tables = dict[str, Any]
OpenSegment = Callable[[int, frozenset[int]], Segment]  # called with the first number and the dead documents


def open_generation(directory: Path, wanted: str) -> Index | None:
    """Open the current generation; None if there is none, it has another stamp, or it cannot be read."""
    try:
        pointer = json.loads((directory / POINTER).read_bytes())
        if pointer["stamp"] != wanted:
            return None
        tables = json.loads((directory / Path(pointer["generation"]).name / TABLES).read_bytes())
        return open_tables(directory, tables, tables["recipe"])
    except Exception:  # Whoosh raises anything on a torn index: EOFError, zlib.error, TypeError, struct.error ...
        return None


def open_tables(directory: Path, tables: Tables, recipe: str, in_memory: OpenSegment | None = None) -> Index:
    """Open the index of a generation. `in_memory` opens the segment without a path.

    Raises any exception if a segment is torn.
    """
    with ExitStack() as opened:
        segments: list[Segment] = []
        for row in tables["segments"]:
            first, dead = segments[-1].end if segments else 0, frozenset(row["dead"])
            if in_memory and not row["path"]:
                segment = in_memory(first, dead)
            else:
                segment = Segment.open(segment_path(directory, row["path"]), recipe, row["identity"], first, dead)
            segments.append(opened.enter_context(segment))
        index = Index(segments, tables)
        opened.pop_all()
        return index


def segment_path(directory: Path, name: str) -> Path:
    return BUILT_IN_SEGMENT if name == BUILT_IN else directory / Path(name).name


def segment_names(directory: Path) -> list[str]:
    """The names of all segments that may be usable."""
    return [BUILT_IN, *sorted(path.name for path in directory.glob("segment-*"))]


def file_states_of(directory: Path) -> dict[str, FileState]:
    """The states of the entry files when the current generation was made, by path."""
    with suppress(Exception):  # torn or missing
        generation = json.loads((directory / POINTER).read_bytes())["generation"]
        rows = json.loads((directory / Path(generation).name / FILES).read_bytes())
        return {path: (size, changed, digest) for path, (size, changed, digest) in rows.items()}
    return {}


@contextmanager
def new_segments(directory: Path, count: int) -> Iterator[list[Path]]:
    """Empty directories for segments, removed if anything fails."""
    import shutil
    import tempfile

    paths: list[Path] = []
    try:
        paths += (Path(tempfile.mkdtemp(prefix="segment-", dir=directory)) for _ in range(count))
        yield paths
    except BaseException:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)
        raise


def save_generation(directory: Path, wanted: str, tables: Tables, states: dict[Path, FileState]) -> None:
    """Write a generation, make it the current one, and remove what it does not use."""
    import shutil
    import tempfile

    generation = Path(tempfile.mkdtemp(prefix="generation-", dir=directory))
    try:
        (generation / TABLES).write_text(json.dumps(tables))
        (generation / FILES).write_text(json.dumps({str(path): state for path, state in states.items()}))
        pointer = directory / f"{POINTER}.part"
        pointer.write_text(json.dumps({"stamp": wanted, "generation": generation.name}))
        pointer.replace(directory / POINTER)
    except BaseException:
        shutil.rmtree(generation, ignore_errors=True)
        raise
    used = {generation.name, *(row["path"] for row in tables["segments"])}
    for old in (*directory.glob("generation-*"), *directory.glob("segment-*")):
        if old.name not in used:  # a reader that still uses it has the files open
            shutil.rmtree(old, ignore_errors=True)
