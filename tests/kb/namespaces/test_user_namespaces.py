"""User namespaces are made for real: root inside, the same ordinary user outside."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from kb.namespaces import bind_over, bring_up, drop_capabilities, lay_cable, own_network, own_user, tmpfs_over
from kb.probe import Unavailable
from tests.support.ordinary_user import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12

SHM = Path("/dev/shm")  # a folder that an ordinary user reaches, unlike tmp_path
SYSCTL = Path("/proc/sys/user/max_user_namespaces")  # the limit of the user namespace in which it is read and written


@pytest.mark.usefixtures("allowed")
def test_a_user_is_root_inside_and_stays_the_same_user_outside() -> None:
    def job() -> list[int]:
        outside = os.getuid()
        own_user()
        return [outside, os.getuid(), os.getgid(), *map(int, Path("/proc/self/uid_map").read_text().split())]

    outside, *inside = in_child(job)
    assert outside != 0
    assert inside == [0, 0, 0, outside, 1]


def forbid_user_namespaces(uid: int) -> None:
    """In a user namespace in which one is called `uid`: no further one below it."""
    maps = {"setgroups": "deny", "uid_map": f"{uid} {os.getuid()} 1", "gid_map": f"{uid} {os.getgid()} 1"}
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    SYSCTL.write_text("0")


@pytest.mark.usefixtures("allowed")
def test_forbidden_user_namespaces_are_reported_to_an_ordinary_user() -> None:
    def job() -> None:
        forbid_user_namespaces(1000)
        own_user()

    with pytest.raises(Unavailable, match=r"^no user namespace of its own on this machine: No space left on device$"):
        in_child(job)


@pytest.mark.usefixtures("allowed")
def test_root_does_without_a_user_namespace_where_it_is_forbidden() -> None:
    def job() -> list[str]:
        forbid_user_namespaces(0)
        before = os.readlink("/proc/self/ns/user")
        own_user()
        assert os.readlink("/proc/self/ns/user") == before
        tmpfs_over(str(SHM), 1)
        return os.listdir(SHM)

    assert in_child(job) == []


@pytest.mark.usefixtures("allowed")
def test_another_number_has_no_account() -> None:
    def job() -> int:
        own_user(54321)
        return os.getuid()

    assert in_child(job) == 54321


@pytest.mark.usefixtures("allowed")
def test_root_does_not_stand_for_another_number() -> None:
    def job() -> None:
        forbid_user_namespaces(0)
        own_user(54321)

    with pytest.raises(Unavailable, match=r"^no user namespace of its own on this machine: No space left on device$"):
        in_child(job)


@pytest.mark.usefixtures("allowed")
def test_a_user_namespace_that_cannot_be_mapped_is_unavailable() -> None:
    def job() -> None:
        own_user()
        tmpfs_over("/proc", 1)
        own_user()

    with pytest.raises(Unavailable, match=r"^no user namespace of its own on this machine: No such file"):
        in_child(job)


@pytest.mark.parametrize(
    ("act", "lacking"),
    [
        (lambda: tmpfs_over(str(SHM), 1), "no mount namespace of its own on this machine"),
        (lambda: bind_over(os.devnull, "/etc/hosts"), "no mount namespace of its own on this machine"),
        (own_network, "no network of its own on this machine"),
        (lambda: lay_cable("kb0", "kb1", os.getpid()), "no virtual cable between two networks"),
        (lambda: bring_up("lo"), "cannot bring up lo"),
    ],
)
def test_without_a_user_namespace_an_ordinary_user_may_do_nothing(act: Callable[[], None], lacking: str) -> None:
    with pytest.raises(Unavailable, match=rf"^{lacking}.*: Operation not (permitted|supported)$"):
        in_child(act)


@pytest.mark.usefixtures("allowed")
def test_a_dropped_capability_does_not_come_back_with_the_next_program() -> None:
    ptrace, bind_service = 19, 10

    def job() -> list[list[bool]]:
        own_user()  # with all capabilities inside
        drop_capabilities(ptrace)
        statuses = [
            Path("/proc/self/status").read_text(),
            subprocess.check_output(["cat", "/proc/self/status"], text=True),
        ]
        masks = [int(re.findall(r"^CapEff:\s*(\w+)", status, re.MULTILINE)[0], 16) for status in statuses]
        return [[bool(mask >> number & 1) for number in (ptrace, bind_service)] for mask in masks]

    assert in_child(job) == [[False, True], [False, True]]
