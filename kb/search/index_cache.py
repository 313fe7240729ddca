"""Opens the search index and brings it up to date. It is a disposable cache of the content roots.

Opening a Whoosh index runs pickles. So the index is in a directory of mode 0700 that kb created itself, and is never
downloaded; only the segment of the built-in entries is installed, with the code. Changed entries are indexed as another
segment. Whatever is not ours, torn or unreadable is rebuilt, in memory if the cache cannot be written.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kb.content.roots import Root
from kb.errors import IndexUnavailable
from kb.paths import cache_home
from kb.search import generation
from kb.search.fingerprints import FileState, file_states, recipe, stamp
from kb.search.index import Index

if TYPE_CHECKING:
    from kb.search.index_update import IndexedSegment, Plan

LOCK_S = 60.0

Notify = Callable[[str], None]


def home(roots: tuple[Root, ...]) -> Path:
    """Where the index of these roots is cached."""
    names = "\n".join(str(root.entries) for root in roots)
    return cache_home() / "index" / hashlib.sha256(names.encode()).hexdigest()[:16]


def open_index(roots: tuple[Root, ...], notify: Notify = lambda _: None, *, force: bool = False) -> Index:
    """Open the index of these roots, up to date. `notify` is called with progress and warnings.

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
    """The index if every entry is indexed in its present state, else None. Builds nothing."""
    from kb.search.index_update import generation_tables

    directory = home(roots)
    index = _open(directory, stamp(roots))
    if index:
        return index
    planned, _ = _planned(directory, roots)
    return None if planned.pending else generation.open_tables(directory, generation_tables(planned, (), {}), recipe())


def _open(directory: Path, wanted: str) -> Index | None:
    """The current generation; None if there is none, it is stale, it is not ours, or it cannot be read."""
    return generation.open_generation(directory, wanted) if _is_ours(directory) else None


def _is_ours(directory: Path) -> bool:
    try:
        state = directory.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(state.st_mode) and state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _prepare(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not _is_ours(directory):
        raise PermissionError(0, "somebody else can write there")
    directory.chmod(0o700)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Admit one builder at a time; the lock ends with the process. Raises `IndexUnavailable` after `LOCK_S`."""
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


def _planned(directory: Path, roots: tuple[Root, ...], *, is_new: bool = False) -> tuple[Plan, dict[Path, FileState]]:
    """The plan for the present files, and their states. If `is_new`, no segment is used again."""
    from kb.search.index_update import plan

    is_ours = not is_new and _is_ours(directory)
    states = file_states(roots, generation.file_states_of(directory) if is_ours else {})
    names = generation.segment_names(directory) if is_ours else [] if is_new else [generation.BUILT_IN]
    segments = (_load(directory, name) for name in names)
    return plan(roots, states, [segment for segment in segments if segment]), states


def _load(directory: Path, name: str) -> IndexedSegment | None:
    from kb.search.index_update import IndexedSegment

    return IndexedSegment.load(generation.segment_path(directory, name), name, recipe())


def _update(directory: Path, roots: tuple[Root, ...], wanted: str, notify: Notify, *, force: bool) -> Index:
    """Write a new generation and open it, with the existing segments, or without them if that fails.

    Raises `OSError`, also if another process deletes what was written.
    """
    for is_new in (True,) if force else (False, True):
        planned, states = _planned(directory, roots, is_new=is_new)
        _write(directory, planned, states, wanted, notify)
        index = _open(directory, wanted)
        if index:
            return index
    raise OSError(0, "what was just written there is gone or cannot be read")


def _write(directory: Path, planned: Plan, states: dict[Path, FileState], wanted: str, notify: Notify) -> None:
    from kb.search.index_update import generation_tables

    unreadable: dict[str, str] = {}
    count = 0
    if planned.pending:
        from kb.search import index_workers

        count = index_workers.segments_for(len(planned.pending))
    with generation.new_segments(directory, count) as paths:
        if paths:
            files = [(file.path, file.origin) for file in planned.pending]
            unreadable = index_workers.write_segments(paths, files, planned.ids, notify)
        segments = [segment for path in paths if (segment := _load(directory, path.name))]
        tables = {**generation_tables(planned, segments, unreadable), "recipe": recipe()}
        _notify_problems(tables["problems"], notify)
        generation.save_generation(directory, wanted, tables, states)


def _open_in_memory(directory: Path, roots: tuple[Root, ...], notify: Notify, error: OSError) -> Index:
    """Open the index, and index in memory the entries that no segment holds."""
    from kb.search.index_update import generation_tables

    planned, _ = _planned(directory, roots)
    if not planned.pending:
        return generation.open_tables(directory, generation_tables(planned, (), {}), recipe())
    from kb.search.index_writer import write_in_memory

    reason = error.strerror or str(error)
    notify(f"the index cannot be kept in {directory} ({reason}); this search builds it in memory")
    files = [(file.path, file.origin) for file in planned.pending]
    in_memory, indexed, unreadable = write_in_memory(files, planned.ids, notify)
    tables = generation_tables(planned, [indexed], unreadable)
    _notify_problems(tables["problems"], notify)
    return generation.open_tables(directory, tables, recipe(), in_memory)


def _notify_problems(problems: list[str], notify: Notify) -> None:
    for problem in problems:
        notify(f"left out: {problem}")
