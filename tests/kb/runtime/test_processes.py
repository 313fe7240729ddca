from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kb.runtime import processes
from kb.runtime.processes import Process, descendants, listed_descendants, read_process, shared_memory_files

TREE = "sleep 60 & sh -c 'sleep 60 & wait' & echo ready; wait"


@pytest.fixture
def shell() -> Iterator[subprocess.Popen[str]]:
    """A shell with a sleep, and a shell with a sleep below it."""
    with subprocess.Popen(["sh", "-c", TREE], stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout
        assert shell.stdout.readline() == "ready\n"
        yield shell
        for process in [*descendants(shell.pid), *filter(None, [read_process(shell.pid)])]:
            processes.send_signal(process, signal.SIGKILL)


def wait_for_names(tree: Callable[[int], list[Process]], pid: int, names: list[str]) -> None:
    for _ in range(1000):
        if sorted(process.name for process in tree(pid)) == names:
            return
        time.sleep(0.01)
    assert sorted(process.name for process in tree(pid)) == names


@pytest.mark.parametrize("tree", [descendants, listed_descendants])
def test_the_whole_tree_is_found(shell: subprocess.Popen[str], tree: Callable[[int], list[Process]]) -> None:
    wait_for_names(tree, shell.pid, ["sh", "sleep", "sleep"])


def test_a_process_that_a_thread_starts_is_below_it() -> None:
    started: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def start() -> None:
        started.append(subprocess.Popen(["sleep", "60"]))
        done.wait(60)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        wait_for_names(
            lambda pid: [each for each in listed_descendants(pid) if each.pid == started[0].pid] if started else [],
            os.getpid(),
            ["sleep"],
        )
    finally:
        done.set()
        thread.join()
        started[0].kill()
        started[0].wait()


def test_a_kernel_that_lists_no_children_is_asked_for_all_processes(
    shell: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for_names(descendants, shell.pid, ["sh", "sleep", "sleep"])
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: not str(path).endswith("/children") and exists(path))
    monkeypatch.setattr(processes, "_children", lambda _: pytest.fail("the file is not there"))
    assert len(listed_descendants(shell.pid)) == 3


def test_nothing_is_below_a_process_that_is_gone() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert listed_descendants(gone.pid) == []


def test_a_folder_of_shared_memory_that_may_not_be_listed_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = os.listdir

    def refuse(path: str) -> list[str]:
        if path == "/dev/shm":
            raise PermissionError(path)
        return listed(path)

    monkeypatch.setattr(os, "listdir", refuse)
    own = read_process(os.getpid())
    assert own
    assert isinstance(shared_memory_files([own]), set)


def test_a_file_in_shared_memory_belongs_to_the_process_that_holds_it() -> None:
    path = Path("/dev/shm") / f"kb-test-{os.getpid()}"
    own = read_process(os.getpid())
    assert own
    assert str(path) not in shared_memory_files([own])
    with path.open("w"):
        try:
            assert str(path) in shared_memory_files([own])
        finally:
            path.unlink()
    assert str(path) not in shared_memory_files([own])
