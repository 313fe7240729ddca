"""kb.machine.cgroup over a directory that stands for /sys/fs/cgroup: files and a mount table as the kernel writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from kb.machine import cgroup
from kb.runtime.survey_fields import Reader

PAGES = 100 << 20
FILES_2 = {
    "memory.max": f"{512 << 20}\n",
    "memory.current": f"{300 << 20}\n",
    "memory.stat": f"anon 1\ninactive_file {PAGES}\n",
    "cpu.max": "150000 100000\n",
}
FILES_1 = {
    "memory/memory.limit_in_bytes": f"{512 << 20}\n",
    "memory/memory.usage_in_bytes": f"{300 << 20}\n",
    "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {PAGES}\n",
    "cpu/cpu.cfs_quota_us": "150000\n",
    "cpu/cpu.cfs_period_us": "100000\n",
}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /sys/fs/cgroup; nothing is mounted there."""
    path = tmp_path / "cgroup"
    path.mkdir()
    (tmp_path / "mounts").write_text("/dev/sda / ext4 rw 0 0\n")
    monkeypatch.setattr(cgroup, "ROOT", path)
    monkeypatch.setattr(cgroup, "MOUNTS", tmp_path / "mounts")
    monkeypatch.setattr(cgroup, "MEMBERSHIP", tmp_path / "membership")
    return path


def mount(root: Path, version: int, own: str = "/") -> None:
    """As a version of cgroup, with our own group below it."""
    mounts = {
        1: f"tmpfs {root} tmpfs rw 0 0\ncgroup {root}/memory cgroup rw,memory 0 0\n",
        2: f"tmpfs {root} tmpfs rw 0 0\ncgroup2 {root} cgroup2 rw 0 0\n",  # the last one hides those below
    }
    membership = {1: f"4:memory:{own}\n3:cpu,cpuacct:{own}\n0::/\n", 2: f"0::{own}\n"}
    cgroup.MOUNTS.write_text(mounts[version])
    cgroup.MEMBERSHIP.write_text(membership[version])


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def read() -> tuple[dict[str, Any], dict[str, str]]:
    reader = Reader()
    return reader.values("cgroup", cgroup.SOURCES), reader.reasons


@pytest.mark.parametrize(("version", "files"), [(1, FILES_1), (2, FILES_2)])
def test_reads_the_limits(root: Path, version: int, files: dict[str, str]) -> None:
    mount(root, version)
    write(root, files)
    result, reasons = read()
    assert result == {"version": version, "memory_limit_mib": 512, "memory_used_mib": 200, "cpu_quota": 1.5}
    assert reasons == {}


def test_a_plain_directory_of_the_name_sets_no_limits(root: Path) -> None:
    write(root, FILES_2)
    result, reasons = read()
    assert set(result.values()) == {None}
    assert reasons["cgroup.memory_limit_mib"] == f"no cgroup file system is mounted on {root}"


@pytest.mark.parametrize(
    ("version", "files"),
    [
        (1, {**FILES_1, "memory/memory.limit_in_bytes": f"{(1 << 63) - 4096}\n", "cpu/cpu.cfs_quota_us": "-1\n"}),
        (2, {**FILES_2, "memory.max": "max\n", "cpu.max": "max 100000\n"}),
    ],
)
def test_a_cgroup_without_limits_says_so(root: Path, version: int, files: dict[str, str]) -> None:
    mount(root, version)
    write(root, files)
    result, _ = read()
    assert (result["memory_limit_mib"], result["cpu_quota"]) == ("unlimited", "unlimited")


def test_the_tightest_limit_of_a_group_and_those_above_holds(root: Path) -> None:
    mount(root, 2, own="/job/step")
    write(root / "job", {**FILES_2, "cpu.max": "800000 100000\n"})
    write(root / "job" / "step", {**FILES_2, "memory.max": "max\n", "memory.current": "0\n"})
    result, _ = read()
    assert (result["memory_limit_mib"], result["memory_used_mib"], result["cpu_quota"]) == (512, 200, 1.5)


@pytest.mark.parametrize("own", ["/kubepods/pod1/abc", "/../../job"])
def test_of_a_group_that_the_container_does_not_show_what_it_shows_counts(root: Path, own: str) -> None:
    mount(root, 2, own=own)
    write(root, {**FILES_2, "memory.max": "max\n"})
    result, _ = read()
    assert (result["memory_limit_mib"], result["memory_used_mib"]) == ("unlimited", 200)


def test_a_root_group_that_does_not_count_memory_is_null_with_a_reason(root: Path) -> None:
    mount(root, 2)
    result, reasons = read()
    assert (result["memory_limit_mib"], result["memory_used_mib"]) == ("unlimited", None)
    assert reasons["cgroup.memory_used_mib"] == f"{root} does not count memory"


def test_reads_this_machine_or_says_why_not() -> None:
    result, reasons = read()
    assert {f"cgroup.{name}" for name, value in result.items() if value is None} == set(reasons)
