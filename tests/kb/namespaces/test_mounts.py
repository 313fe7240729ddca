"""Mounts are made for real, by an ordinary user, and nothing of them is seen outside."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kb.namespaces import bind_over, own_user, tmpfs_over
from kb.probe import Unavailable
from tests.support.ordinary_user import end_in_20_s, in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12

SHM = Path("/dev/shm")  # a folder that an ordinary user reaches, unlike tmp_path


@pytest.mark.usefixtures("allowed")
def test_a_tmpfs_of_1_mib_is_full_after_1_mib_and_seen_by_its_process_only() -> None:
    def job() -> list[int]:
        own_user()
        tmpfs_over(str(SHM), 1)
        with (SHM / "kb-filled").open("wb", buffering=0) as file:
            written = file.write(b"x" * (1 << 20))
            try:
                file.write(b"x")
            except OSError as error:
                return [written, error.errno or 0]
        return [written, 0]

    mounted = Path("/proc/self/mounts").read_text()
    assert in_child(job) == [1 << 20, errno.ENOSPC]
    assert Path("/proc/self/mounts").read_text() == mounted
    assert not (SHM / "kb-filled").exists()


@pytest.mark.usefixtures("allowed")
def test_mounts_of_root_do_not_propagate_to_shared_mounts() -> None:
    def job() -> list[str]:
        own_user()
        tmpfs_over(str(SHM), 1)
        (SHM / "kb-seen").touch()
        assert ctypes.CDLL(None).mount(b"none", b"/", None, 0x104000, None) == 0  # MS_SHARED, as systemd has it
        other = os.fork()
        if other == 0:
            end_in_20_s()
            tmpfs_over(str(SHM), 1)
            os._exit(17 if os.listdir(SHM) == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 17
        return os.listdir(SHM)

    assert in_child(job) == ["kb-seen"]


@pytest.mark.usefixtures("allowed")
def test_a_file_takes_the_place_of_another_for_its_process_only() -> None:
    def job() -> list[str]:
        own_user()
        tmpfs_over(str(SHM), 1)
        (SHM / "hosts").write_text("127.0.1.1 kb-node-0\n")
        bind_over(str(SHM / "hosts"), "/etc/hosts")
        return [Path("/etc/hosts").read_text(), *os.listdir(SHM)]

    before = Path("/etc/hosts").read_text()
    assert in_child(job) == ["127.0.1.1 kb-node-0\n", "hosts"]
    assert Path("/etc/hosts").read_text() == before


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: tmpfs_over("/no/such/folder", 1), "cannot mount a tmpfs: No such file or directory"),
        (lambda: bind_over("/dev/null", "/no/such"), "cannot mount /dev/null over /no/such: No such file or directory"),
    ],
)
def test_a_mount_that_fails_says_why(act: Callable[[], None], reason: str) -> None:
    def job() -> None:
        own_user()
        act()

    with pytest.raises(Unavailable, match=f"^{reason}$"):
        in_child(job)
