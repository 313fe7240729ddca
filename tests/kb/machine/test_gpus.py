"""kb.machine.gpus and kb.machine.driver, asking a real command: an `nvidia-smi` that answers as drivers in trouble do."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kb.machine import driver, gpus
from kb.machine.gpus import Gpu
from kb.machine.snapshot import capture
from kb.runtime import processes
from kb.runtime.survey_fields import Reader

IDLE = "{0}, GPU-{0}, NVIDIA H100 80GB HBM3, 550.54.15, 81559, 4, 81000, 0, Default, 00000000:1{0}:00.0, Disabled, 0"
LOST = "Unable to determine the device handle for GPU 0000:1A:00.0: GPU is lost.  Reboot the system"
BANNER = "| NVIDIA-SMI 550.54.15    Driver Version: 550.54.15    CUDA Version: 12.4     |"
TOPOLOGY = "\x1b[4m\tGPU0\tGPU1\x1b[0m\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n"
HANGS = "trap '' TERM; while :; do sleep 1000; done"

Smi = Callable[..., None]


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Smi:
    """Put an `nvidia-smi` first on PATH that answers each kind of question with a shell command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(query: str, version: str = "exit 2", topo: str = "exit 3", banner: str = "exit 9") -> None:
        path = folder / "nvidia-smi"
        cases = {"--query-gpu=*": query, "--version": version, "topo": topo, "*": banner}
        lines = [f"{pattern}) {command} ;;" for pattern, command in cases.items()]
        path.write_text("\n".join(["#!/bin/sh", f"echo $$ >> {tmp_path}/pids", 'case "$1" in', *lines, "esac\n"]))
        path.chmod(0o755)

    return write


def say(tmp_path: Path, name: str, text: str) -> str:
    (tmp_path / name).write_text(text)
    return f"cat {tmp_path / name}"


@pytest.fixture
def two_gpus(smi: Smi, tmp_path: Path) -> None:
    rows = "\n".join(IDLE.format(index) for index in range(2)) + "\n"
    smi(say(tmp_path, "rows", rows), say(tmp_path, "version", "CUDA Version : 12.4\n"), say(tmp_path, "topo", TOPOLOGY))


def ask() -> tuple[tuple[Gpu, ...] | None, dict[str, Any], dict[str, str]]:
    """GPUs, what their driver says of itself, and the reasons for what is missing."""
    reader = Reader()
    result, silence = gpus.list_gpus(reader)
    return result, reader.values("driver", driver.sources(silence)), reader.reasons


def only(gpus: tuple[Gpu, ...] | None) -> Gpu:
    assert gpus is not None
    (gpu,) = gpus
    return gpu


@pytest.mark.usefixtures("two_gpus")
def test_a_snapshot_lists_gpus_with_driver_and_topology() -> None:
    snapshot = capture(Path(sys.executable))
    document = json.loads(json.dumps(snapshot.to_json()))
    assert [gpu["uuid"] for gpu in document["gpus"]] == ["GPU-0", "GPU-1"]
    assert document["gpus"][1] == {
        "index": 1,
        "uuid": "GPU-1",
        "name": "NVIDIA H100 80GB HBM3",
        "driver_version": "550.54.15",
        "memory_total_mib": 81559,
        "memory_used_mib": 4,
        "memory_free_mib": 81000,
        "utilization_percent": 0,
        "compute_mode": "Default",
        "pci_bus_id": "00000000:11:00.0",
        "mig_mode": "Disabled",
        "ecc_uncorrected": 0,
    }
    assert document["driver"]["cuda_version"] == "12.4"
    assert document["driver"]["topology"] == "GPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X"
    assert not {"gpus", "driver.cuda_version", "driver.topology"} & set(snapshot.reasons)


def test_an_old_driver_that_refuses_a_field_gives_the_others(smi: Smi, tmp_path: Path) -> None:
    row = ", ".join(IDLE.format(0).split(", ")[:10]) + ", 0\n"
    refusal = "echo 'Field \"mig.mode.current\" is not a valid field to query.'; exit 2"
    smi(f'case "$1" in *mig*) {refusal};; *) {say(tmp_path, "rows", row)};; esac')
    result, _, reasons = ask()
    assert (only(result).mig_mode, only(result).ecc_uncorrected) == (None, 0)
    assert reasons["gpus.0.mig_mode"] == "this nvidia-smi does not know the field"


@pytest.mark.parametrize(
    "banner", [BANNER, "| NVIDIA-SMI 610.43.02       KMD Version: 610.43.02     CUDA UMD Version: 12.4     |"]
)
def test_reads_cuda_from_the_heading_when_there_is_no_version_option(smi: Smi, tmp_path: Path, banner: str) -> None:
    smi(say(tmp_path, "rows", IDLE.format(0)), banner=say(tmp_path, "banner", banner))
    _, output, _ = ask()
    assert output["cuda_version"] == "12.4"


def test_a_lost_gpu_is_reported_beside_the_others(smi: Smi, tmp_path: Path) -> None:
    smi(f"{say(tmp_path, 'rows', IDLE.format(0) + chr(10) + LOST)}; exit 15")
    result, _, reasons = ask()
    assert only(result).uuid == "GPU-0"
    assert reasons["gpus"] == f"nvidia-smi (exit code 15): {LOST}"


def test_values_that_the_driver_does_not_give_are_null(smi: Smi, tmp_path: Path) -> None:
    row = "0, GPU-0, NVIDIA GB10, 580.65, [N/A], [Not Supported], , ERR!, Default, 0:01, [N/A], [Unknown Error]"
    smi(say(tmp_path, "rows", row))
    result, _, reasons = ask()
    assert result == (
        Gpu(
            index=0,
            uuid="GPU-0",
            name="NVIDIA GB10",
            driver_version="580.65",
            compute_mode="Default",
            pci_bus_id="0:01",
        ),
    )
    assert reasons["gpus.0.memory_used_mib"] == "nvidia-smi says '[Not Supported]'"
    assert reasons["gpus.0.utilization_percent"] == "nvidia-smi says 'ERR!'"


def test_a_driver_that_does_not_fit_its_library_is_the_reason(smi: Smi) -> None:
    smi("echo 'Failed to initialize NVML: Driver/library version mismatch'; echo 'NVML library version: 550'; exit 18")
    result, _, reasons = ask()
    assert result is None
    assert reasons["gpus"] == "nvidia-smi (exit code 18): Failed to initialize NVML: Driver/library version mismatch"
    assert reasons["driver.topology"] == "nvidia-smi (exit code 3): no message"


def test_a_driver_that_hangs_is_asked_once(smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "SMI_S", 0.5)
    smi(HANGS)
    result, _, reasons = ask()
    assert result is None
    for path in ("gpus", "driver.cuda_version", "driver.topology"):
        assert reasons[path] == "nvidia-smi did not end within 0.5 s"
    (pid,) = (tmp_path / "pids").read_text().split()
    left = processes.read_process(int(pid))
    assert left is None or not left.is_alive


def test_a_driver_that_floods_is_cut_off(smi: Smi) -> None:
    smi("exec yes")
    result, _, reasons = ask()
    assert result is None
    assert reasons["gpus"] == "nvidia-smi printed more than 16 MiB"


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("NVIDIA UNIX x86_64 Kernel Module", "550.54.15"),
        ("NVIDIA UNIX Open Kernel Module for x86_64", "570.86.15"),
        ("NVIDIA UNIX Open Kernel Module for aarch64", "610.43"),
    ],
)
def test_reads_the_version_of_the_kernel_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, version: str
) -> None:
    path = tmp_path / "version"
    path.write_text(
        f"NVRM version: {name}  {version}  Tue Mar  5 22:23:56 UTC 2024\nGCC version:  gcc version 12.2.0\n"
    )
    monkeypatch.setattr(driver, "KERNEL_MODULE", path)
    assert driver.sources("")["kernel_module"]() == version


def test_counts_the_gpus_on_the_bus_and_not_their_bridges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"a": ("0x10de", "0x030200"), "b": ("0x10de", "0x030000"), "nvswitch": ("0x10de", "0x068000")}
    for name, (vendor, kind) in {**devices, "vga of another": ("0x1a03", "0x030000")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    monkeypatch.setattr(driver, "PCI_DEVICES", tmp_path)
    assert driver.sources("")["gpus_on_bus"]() == 2


def test_memory_in_use_is_that_of_the_gpus_asked_for(smi: Smi, tmp_path: Path) -> None:
    smi(say(tmp_path, "rows", f"GPU-0, 4\nGPU-1, 41000\nGPU-2, [N/A]\n{LOST}\n"))
    assert gpus.used_memory(("GPU-1", "GPU-2", "GPU-3")) == {"GPU-1": 41000}


def test_memory_in_use_is_unknown_when_the_driver_does_not_answer(smi: Smi) -> None:
    smi("echo 'Failed to initialize NVML: Unknown Error'; exit 255")
    assert gpus.used_memory(("GPU-0",)) == {}


def test_memory_that_is_given_back_late_is_not_held(smi: Smi, tmp_path: Path) -> None:
    rows = tmp_path / "rows"
    rows.write_text("GPU-0, 900\n")
    smi(f"cat {rows}; echo 'GPU-0, 50' > {rows}")
    assert gpus.not_released({"GPU-0": 4}) == []
    assert len((tmp_path / "pids").read_text().split()) == 2


def test_memory_that_stays_in_use_is_named(smi: Smi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "PATIENCE_S", 0.0)
    smi(say(tmp_path, "rows", "GPU-0, 4\nGPU-1, 904\n"))
    assert gpus.not_released({"GPU-0": 4, "GPU-1": 4}) == ["GPU GPU-1: 900 MiB not released"]
