"""The NVIDIA driver: what nvidia-smi reports, and what the kernel shows if it does not answer."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kb.harness.subprocesses import CommandResult
from kb.machine.gpus import nvidia_smi, smi_output
from kb.runtime.survey_fields import Unknown, read_text

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
PCI_DEVICES = Path("/sys/bus/pci/devices")
NVIDIA, DISPLAY = "0x10de", "0x03"  # PCI vendor, and the beginning of the PCI classes of GPUs

CUDA_VERSION = re.compile(r"CUDA (?:UMD )?Version\s*:\s*(\d+\.\d+)")  # UMD since driver 610
TERMINAL = re.compile(r"\x1b\[[\d;]*m")  # nvidia-smi underlines the heading of its topology


def sources(silence: str) -> Mapping[str, Callable[[], Any]]:
    """The sources. `silence` is why nvidia-smi did not answer before, or ""; asking again would only time out again."""
    return {
        "kernel_module": _kernel_module,
        "gpus_on_bus": _gpus_on_bus,
        "cuda_version": lambda: _cuda_version(silence),
        "topology": lambda: TERMINAL.sub("", smi_output(_query_driver(silence, "topo", "-m"))).strip(),
    }


def _query_driver(silence: str, *arguments: str) -> CommandResult:
    if silence:
        raise Unknown(silence)
    return nvidia_smi(*arguments)


def _cuda_version(silence: str) -> str:
    """The newest CUDA that the driver can run. Drivers before 525 have no `--version`, but all print a heading."""
    version = _query_driver(silence, "--version")
    match = CUDA_VERSION.search(version.stdout) or CUDA_VERSION.search(smi_output(_query_driver(version.failure)))
    if not match:
        raise Unknown("nvidia-smi does not say")
    return match.group(1)


def _kernel_module() -> str:
    """The version of the loaded kernel module, readable even if nvidia-smi hangs or does not match it."""
    if not KERNEL_MODULE.exists():
        raise Unknown("the NVIDIA kernel module is not loaded")
    match = re.search(r"Module.*?\s(\d+\.\d[\d.]*)\s", read_text(KERNEL_MODULE))
    if not match:
        raise Unknown(f"{KERNEL_MODULE} does not say")
    return match.group(1)


def _gpus_on_bus() -> int:
    """The number of NVIDIA display controllers on PCI; if nvidia-smi lists fewer, the driver lost one."""
    devices = [device for device in PCI_DEVICES.iterdir() if read_text(device / "vendor") == NVIDIA]
    return sum(read_text(device / "class").startswith(DISPLAY) for device in devices)
