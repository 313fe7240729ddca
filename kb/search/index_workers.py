"""Indexes many files in parallel: each process makes its own segment.

Reading and tokenizing a thousand entries takes one core more than ten seconds. For fewer files than `LEAST_FILES`, or
if no other process can be started, this process does it alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from kb.search.index_writer import Files, Notify, building, write_segment

LEAST_FILES = 128  # per process
MOST_PROCESSES = 4  # each segment costs every search some milliseconds

Problems = dict[str, str]


def write_segments(directories: list[Path], files: Files, ids: Set[str], notify: Notify) -> Problems:
    """Index the files into these empty directories, an equal share each. Returns the problems of files by path.

    Raises `OSError` if a segment cannot be written.
    """
    if len(directories) == 1:
        return write_segment(directories[0], files, ids, notify)
    notify(building(len(files)))
    shares = [files[at :: len(directories)] for at in range(len(directories))]
    tasks = list(zip(directories, shares, strict=True))
    with ExitStack() as running:
        workers = [running.enter_context(_worker(directory, share, ids)) for directory, share in tasks[1:]]
        problems = write_segment(*tasks[0], ids)
        for (directory, share), worker in zip(tasks[1:], workers, strict=True):
            answer = _answer(worker)
            problems |= _write_again(directory, share, ids) if answer is None else answer
    return problems


def segments_for(count: int) -> int:
    """How many segments this number of files is worth."""
    return max(1, min(count // LEAST_FILES, len(os.sched_getaffinity(0)), MOST_PROCESSES))


@contextmanager
def _worker(directory: Path, files: Files, ids: Set[str]) -> Iterator[subprocess.Popen[str] | None]:
    """A running process, ended with the block; None if it cannot be started."""
    task = {"directory": str(directory), "files": [(str(path), origin) for path, origin in files], "ids": sorted(ids)}
    command = [sys.executable, "-P", "-m", "kb.search.index_workers"]  # -P: not a kb in the working directory
    pipe = subprocess.PIPE
    try:
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
    except OSError:
        yield None
        return
    with worker:
        try:
            assert worker.stdin
            with suppress(OSError):  # it has ended, which its answer shows
                json.dump(task, worker.stdin)
                worker.stdin.close()
            yield worker
        finally:
            worker.kill()


def _answer(worker: subprocess.Popen[str] | None) -> Problems | None:
    """The problems of the worker's files; None if it failed: no memory, another kb on its path, ..."""
    if worker is None or worker.stdout is None:
        return None
    answer = worker.stdout.read()
    if worker.wait() != 0:
        return None
    problems: Problems = json.loads(answer)
    return problems


def _write_again(directory: Path, files: Files, ids: Set[str]) -> Problems:
    for file in directory.iterdir():
        file.unlink()
    return write_segment(directory, files, ids)


def main() -> None:
    """A worker: reads a task from standard input, writes the problems of its files to standard output."""
    task = json.load(sys.stdin)
    files = [(Path(path), origin) for path, origin in task["files"]]
    json.dump(write_segment(Path(task["directory"]), files, frozenset(task["ids"])), sys.stdout)


if __name__ == "__main__":
    main()
