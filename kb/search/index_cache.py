"""Opens the search index, and brings it up to date: a disposable cache of the content roots.

Opening a Whoosh index runs pickles, so it lives in a directory of mode 0700 that kb built itself and is never
downloaded; only the segment of the built-in entries is installed, with the code. A generation names its segments. It is
written into a fresh directory and swapped in by renaming a pointer; a reader holds one generation. Entries that changed
are indexed as a further segment. What is foreign, torn or unreadable is built again, and when the cache cannot be
written at all, in memory.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kb.content.roots import Root
from kb.errors import IndexUnavailable
from kb.paths import cache_home
from kb.search.fingerprints import FileState, file_states, recipe, stamp
from kb.search.index import Index
from kb.search.segment import Segment

if TYPE_CHECKING:
    from kb.search.index_update import IndexedSegment, Plan

LOCK_S = 60.0
BUILT_IN = "built-in"
BUILT_IN_SEGMENT = Path(__file__).with_name("built_in_index")
POINTER, TABLES, FILES = "current.json", "tables.json", "files.json"

Notify = Callable[[str], None]


def home(roots: tuple[Root, ...]) -> Path:
    """Where the index of these roots is cached."""
    names = "\n".join(str(root.entries) for root in roots)
    return cache_home() / "index" / hashlib.sha256(names.encode()).hexdigest()[:16]


def open_index(roots: tuple[Root, ...], notify: Notify = lambda _: None, *, force: bool = False) -> Index:
    """The index of these roots, brought up to date first. `notify` is called with progress and warnings.

    With `force` every entry is indexed again. Raises `IndexUnavailable`.
    """
    wanted, directory = stamp(roots), home(roots)
    index = None if force else _open(directory, wanted)
    if index:
        return index
    try:
        _prepare(directory)
        with _locked(directory):
            index = None if force else _open(directory, wanted)  # another process built it in the meantime
            return index or _update(directory, roots, wanted, notify, force=force)
    except OSError as error:
        return _open_in_memory(directory, roots, notify, error)


def open_if_fresh(roots: tuple[Root, ...]) -> Index | None:
    """The index when every entry is indexed as it is now; builds nothing."""
    from kb.search.index_update import needs_indexing, plan

    index = _open(home(roots), stamp(roots))
    if index:
        return index
    segments, known = _indexed(home(roots))
    states = file_states(roots, known)
    if needs_indexing(roots, states, segments):
        return None
    return _in_memory(home(roots), plan(roots, states, segments), lambda _: None)


def _open(directory: Path, wanted: str) -> Index | None:
    """The current generation, or None when there is none, it is stale, it is not ours, or it cannot be read."""
    segments: list[Segment] = []
    try:
        if not _is_ours(directory):
            return None
        pointer = json.loads((directory / POINTER).read_bytes())
        if pointer["stamp"] != wanted:
            return None
        tables = json.loads((directory / Path(pointer["generation"]).name / TABLES).read_bytes())
        for row in tables["segments"]:
            first = segments[-1].end if segments else 0
            path = _segment_path(directory, row["path"])
            segments.append(Segment.open(path, tables["recipe"], row["identity"], first, frozenset(row["dead"])))
        return Index(segments, tables)
    except Exception:  # Whoosh raises anything on a torn index: EOFError, zlib.error, TypeError, struct.error ...
        for segment in segments:
            segment.close()
        return None


def _segment_path(directory: Path, name: str) -> Path:
    return BUILT_IN_SEGMENT if name == BUILT_IN else directory / Path(name).name


def _is_ours(directory: Path) -> bool:
    state = directory.lstat()
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(directory):
        raise PermissionError(0, "somebody else can write there")
    directory.chmod(0o700)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """One builder at a time; the lock goes with the process. Raises `IndexUnavailable` after `LOCK_S`."""
    with (directory / "lock").open("w") as file:
        end = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise IndexUnavailable(
                        f"another process has been building the index in {directory} for a minute",
                        "wait for it, or end it: the lock goes with the process",
                    ) from None
                time.sleep(0.05)
        yield


def _indexed(directory: Path) -> tuple[list[IndexedSegment], dict[str, FileState]]:
    """The segments that can be used again, and the states of files when the current generation was made."""
    from kb.search.index_update import IndexedSegment

    paths = [BUILT_IN_SEGMENT]
    states: dict[str, FileState] = {}
    with suppress(Exception):  # what is torn is not used
        if _is_ours(directory):
            paths += sorted(directory.glob("segment-*"))
            generation = json.loads((directory / POINTER).read_bytes())["generation"]
            rows = json.loads((directory / Path(generation).name / FILES).read_bytes())
            states = {path: (size, changed, digest) for path, (size, changed, digest) in rows.items()}
    names = (BUILT_IN if path == BUILT_IN_SEGMENT else path.name for path in paths)
    segments = (IndexedSegment.load(path, name, recipe()) for path, name in zip(paths, names, strict=True))
    return [segment for segment in segments if segment], states


def _update(directory: Path, roots: tuple[Root, ...], wanted: str, notify: Notify, *, force: bool) -> Index:
    """Write a new generation and open it: of the segments that are there, or if that fails without them."""
    from kb.search.index_update import plan

    segments, known = ([], {}) if force else _indexed(directory)
    states = file_states(roots, known)
    for usable in (segments, []) if segments else ([],):
        _write_generation(directory, plan(roots, states, usable), states, wanted, notify)
        index = _open(directory, wanted)
        if index:
            return index
    raise IndexUnavailable(f"the index just built in {directory} cannot be read", "`kb doctor` says more")


def _write_generation(
    directory: Path, planned: Plan, states: dict[Path, FileState], wanted: str, notify: Notify
) -> None:
    import shutil
    import tempfile

    made: list[Path] = []

    def make(prefix: str) -> Path:
        made.append(Path(tempfile.mkdtemp(prefix=prefix, dir=directory)))
        return made[-1]

    try:
        rows = [
            {"path": segment.path, "identity": segment.identity, "dead": dead} for segment, dead in planned.segments
        ]
        _notify_problems(planned, notify)
        if planned.entries:
            from kb.search.index_writer import write_files

            path = make("segment-")
            identity = write_files(path, planned.entries, planned.ids, notify)
            rows.append({"path": path.name, "identity": identity, "dead": ()})
        generation = make("generation-")
        (generation / TABLES).write_text(json.dumps({**planned.tables, "segments": rows, "recipe": recipe()}))
        (generation / FILES).write_text(json.dumps({str(path): state for path, state in states.items()}))
        pointer = directory / f"{POINTER}.part"
        pointer.write_text(json.dumps({"stamp": wanted, "generation": generation.name}))
        pointer.replace(directory / POINTER)
    except BaseException:
        for path in made:
            shutil.rmtree(path, ignore_errors=True)
        raise
    used = {generation.name, *(row["path"] for row in rows)}
    for old in (*directory.glob("generation-*"), *directory.glob("segment-*")):
        if old.name not in used:  # a reader that still holds it keeps its files open
            shutil.rmtree(old, ignore_errors=True)


def _open_in_memory(directory: Path, roots: tuple[Root, ...], notify: Notify, error: OSError) -> Index:
    from kb.search.index_update import plan

    segments, known = _indexed(directory)
    planned = plan(roots, file_states(roots, known), segments)
    if planned.entries:
        reason = error.strerror or str(error)
        notify(f"the index cannot be kept in {directory} ({reason}); this search builds it in memory")
    _notify_problems(planned, notify)
    return _in_memory(directory, planned, notify)


def _notify_problems(planned: Plan, notify: Notify) -> None:
    for problem in planned.tables["problems"]:
        notify(f"left out: {problem}")


def _in_memory(directory: Path, planned: Plan, notify: Notify) -> Index:
    """The generation, with the entries that no segment has in memory."""
    tables: dict[str, Any] = planned.tables
    segments: list[Segment] = []
    for indexed, dead in planned.segments:
        first = segments[-1].end if segments else 0
        path = _segment_path(directory, indexed.path)
        segments.append(Segment.open(path, recipe(), indexed.identity, first, frozenset(dead)))
    if planned.entries:
        from kb.search.index_writer import write_in_memory

        first = segments[-1].end if segments else 0
        segments.append(write_in_memory(planned.entries, planned.ids, notify, first))
    return Index(segments, tables)
