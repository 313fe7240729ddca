from __future__ import annotations

from pathlib import Path

import pytest

from kb.host import CpuQuota, Mount, compute_capabilities, cpu_quota, file_text, mount_of, ranks_here

LAUNCHERS = ("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "nvidia-smi"
    program.parent.mkdir()
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    return program


def test_a_file_that_cannot_be_read_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b" 4: ACTIVE\xff\n")
    assert file_text(tmp_path / "state") == "4: ACTIVE\ufffd"
    assert [file_text(path) for path in (tmp_path, tmp_path / "none", "a\0b")] == ["", "", ""]


def test_the_tightest_quota_of_a_group_and_those_above_it_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/container\n",
            "sys/fs/cgroup/pod/cpu.max": "250000 100000\n",
            "sys/fs/cgroup/pod/cpu.stat": "nr_periods 200\nnr_throttled 30\n",
            "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        },
    )
    assert cpu_quota(root) == CpuQuota(2.5, str(tmp_path / "sys/fs/cgroup/pod"), 15)


@pytest.mark.parametrize("folder", ["cpu", "cpu,cpuacct"])
def test_version_1_has_a_folder_for_each_controller(tmp_path: Path, folder: str) -> None:
    root = write(
        tmp_path,
        {
            "proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n",
            f"sys/fs/cgroup/{folder}/job/cpu.cfs_quota_us": "50000\n",
            f"sys/fs/cgroup/{folder}/job/cpu.cfs_period_us": "100000\n",
        },
    )
    assert cpu_quota(root).cores == 0.5


@pytest.mark.parametrize("quota", ["max 100000", "-1 100000", "100000 0", "nonsense", ""])
def test_no_quota_is_no_number(tmp_path: Path, quota: str) -> None:
    root = write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": quota})
    assert cpu_quota(root) == CpuQuota(None, "", 0)


def test_a_system_without_cgroups_has_no_quota(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) == CpuQuota(None, "", 0)


def test_what_is_given_wins_over_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    assert ranks_here(None) == (0, "")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "not a number")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "8")
    assert ranks_here(None) == (8, "SLURM_NTASKS_PER_NODE")
    assert ranks_here(2) == (2, "as given")


@pytest.mark.parametrize(
    "printed, expected",
    [("8.0\n8.0\n7.5\n", [(7, 5), (8, 0)]), ("8.0\n[N/A]\n", []), ("", []), ("12.0\n", [(12, 0)])],
)
def test_the_capabilities_of_all_gpus_or_none(smi: Path, printed: str, expected: list[tuple[int, int]]) -> None:
    smi.write_text(f"#!/bin/sh\nprintf '{printed}'\n")
    smi.chmod(0o755)
    assert compute_capabilities() == expected


def test_a_capability_that_is_given_asks_no_gpu() -> None:
    assert compute_capabilities("8.9, 7.5") == [(7, 5), (8, 9)]
    assert compute_capabilities("Hopper") == []


def test_without_nvidia_smi_nothing_is_known(smi: Path) -> None:
    assert not smi.exists()
    assert compute_capabilities() == []


MOUNTS = """\
21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 21 0:40 / /mnt/my\\040data rw - nfs4 server:/export rw,addr=10.0.0.2
31 30 0:41 / /mnt/my\\040data/cache rw - tmpfs tmpfs rw
32 31 0:42 / /mnt/my\\040data/cache rw - lustre mds@tcp:/work rw
a line that is cut
"""


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/etc/hosts", Mount("ext4", "/dev/sda1")),
        ("/mnt/my data/train", Mount("nfs4", "server:/export")),
        ("/mnt/my data", Mount("nfs4", "server:/export")),
        ("/mnt/my data/cache/a", Mount("lustre", "mds@tcp:/work")),
        ("/mnt/my data 2", Mount("ext4", "/dev/sda1")),
    ],
)
def test_a_path_lies_on_the_last_of_the_longest_mounts(tmp_path: Path, path: str, expected: Mount) -> None:
    assert mount_of(path, write(tmp_path, {"proc/self/mountinfo": MOUNTS})) == expected


def test_without_a_list_of_mounts_nothing_is_known(tmp_path: Path) -> None:
    assert mount_of("/etc/hosts", tmp_path) == Mount("", "")
