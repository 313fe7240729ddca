"""CUDA needs the module nvidia_uvm and its device node; nvidia-smi needs neither, so it sees the GPUs without them.

The driver is a stub, built with gcc, that needs a file instead of /dev/nvidia-uvm: without the file its cuInit returns
999, like that of the real driver. A torch built with CUDA then raises the error that it raises on such a machine.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import shutil
import stat
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, Tuple

from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

STUB = """
#include <fcntl.h>
#include <stdlib.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int cuDriverGetVersion(int *version) { *version = 99000; return 0; }
int cuInit(unsigned flags)
{
    if (open(getenv("UVM_NODE"), O_RDWR) < 0) return 999; /* CUDA_ERROR_UNKNOWN */
    return 100; /* CUDA_ERROR_NO_DEVICE: a stub has no GPU */
}
"""


def load_driver(ctx: Context, *, uvm: bool) -> None:
    """Builds and loads the stub; with `uvm` it first makes the node, as `nvidia-modprobe -u -c=0` does."""
    try:
        ctypes.CDLL("libcuda.so.1")
        raise Unavailable("this machine has a real driver, which the loader would find instead of the stub")
    except OSError:
        library = ctx.path("libcuda.so.1")
    command = ["gcc", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", library, "-xc", "-"]
    subprocess.run(command, input=STUB, text=True, check=True)
    os.environ["UVM_NODE"] = ctx.path("nvidia-uvm")
    if uvm:
        Path(ctx.path("nvidia-uvm")).touch()
    ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    ctx.reached()


def ask_driver(ctx: Context, *, uvm: bool) -> None:
    """Calls the functions of the driver that nvidia-smi uses, and then the one with which CUDA starts."""
    load_driver(ctx, uvm=uvm)
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_uint()
    assert driver.nvmlInit_v2() == 0
    assert driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    result = driver.cuInit(0)
    if result == 999:
        raise Symptom(f"NVML counts {count.value} GPU, and cuInit returns {result}")
    assert result == 100


def init_torch(ctx: Context, *, uvm: bool, visible: str = "") -> None:
    """A torch built with CUDA initializes it, with or without CUDA_VISIBLE_DEVICES in the environment."""
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    load_driver(ctx, uvm=uvm)
    import torch

    if torch.version.cuda is None:
        raise Unavailable("this torch was built without CUDA, so it does not look for a driver")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "No CUDA GPUs are available" not in str(error):
            raise


# --- the check: the module nvidia_uvm, its node, and whether this machine was suspended since the boot ----------------

ROOT = Path("/")
CALL = "run python3 -c \"import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))\"; it should print 0"


def check(params: Mapping[str, Any]) -> Finding:
    """Reads /proc, /sys and /dev; it does not start CUDA, because that can load modules and take seconds."""
    if "microsoft" in platform.release().lower() or exists("dev/nvmap"):
        return unknown("this is WSL or a Jetson, whose GPU does not use nvidia_uvm", advice=CALL)
    if not exists("proc/driver/nvidia/version"):
        return unknown("kb sees no NVIDIA driver", advice="run this on the GPU node, and in the job's container")
    if not list(Path(ROOT, "dev").glob("nvidia[0-9]*")):
        advice = "if this is a container, check that it was given a GPU: container-without-gpu"
        return unknown("there is an NVIDIA driver, but no /dev/nvidia0", advice=advice)
    marks = (".dockerenv", "run/.containerenv", ".singularity.d")
    container = "KUBERNETES_SERVICE_HOST" in os.environ or any(map(exists, marks))
    loaded = exists("sys/module/nvidia_uvm")
    majors = device_majors()
    state = "loaded" if loaded else "not loaded" if exists("sys/module") else "unknown (no /sys)"
    evidence = [f"nvidia_uvm: {state}, {describe_sleep()}"]
    versions = {name: read(f"sys/module/{name}/version") for name in ("nvidia", "nvidia_uvm")}
    if all(versions.values()) and len(set(versions.values())) > 1:
        return exposed(*evidence, f"the loaded modules are of two releases: {versions}", advice="reboot the host")
    try:
        node = Path(ROOT, "dev/nvidia-uvm").stat()
    except OSError:
        return without_node(evidence, container)
    if not stat.S_ISCHR(node.st_mode):
        advice = "remove it, then run nvidia-modprobe -u -c=0"
        return exposed(*evidence, "/dev/nvidia-uvm is not a device", advice=advice)
    if not loaded and not container:
        advice = f"run nvidia-modprobe -u -c=0, then {CALL}"
        return unknown(*evidence, "/dev/nvidia-uvm exists, but its module is not loaded", advice=advice)
    if "nvidia-uvm" in majors and os.major(node.st_rdev) != majors["nvidia-uvm"]:
        why = f"/dev/nvidia-uvm has the major number {os.major(node.st_rdev)}, the driver {majors['nvidia-uvm']}"
        advice = "the module was reloaded: make the node again, or restart the container"
        return exposed(*evidence, why, advice=advice)
    if not os.access(Path(ROOT, "dev/nvidia-uvm"), os.R_OK | os.W_OK):
        why = "this user may not read and write /dev/nvidia-uvm"
        advice = "compare ls -l /dev/nvidia* with id, and look at the device rules of the container or job"
        return exposed(*evidence, why, advice=advice)
    why = "the module and its node are present, but kb cannot see whether a suspend broke them"
    return unknown(*evidence, why, advice=CALL)


def without_node(evidence: List[str], container: bool) -> Finding:
    """The finding if /dev/nvidia-uvm is missing: may CUDA make it?"""
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", read("proc/self/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> 21 & 1 and container:  # CAP_SYS_ADMIN
        why = "this container has no /dev/nvidia-uvm, but it is privileged and may make it"
        return unknown(*evidence, why, advice=CALL)
    if container:
        why = "this container has no /dev/nvidia-uvm and may not make it"
        advice = "run nvidia-modprobe -u -c=0 on the host, then restart the container"
        return exposed(*evidence, why, advice=advice)
    path = shutil.which("nvidia-modprobe", path=f"{os.environ.get('PATH', '')}:/usr/bin:/run/current-system/sw/bin")
    if os.geteuid() == 0 or (path and os.stat(path).st_mode & stat.S_ISUID):
        why = f"there is no /dev/nvidia-uvm yet; CUDA may make it when it starts, with {path or 'the rights of root'}"
        return unknown(*evidence, why, advice=CALL)
    why = "there is no /dev/nvidia-uvm, and CUDA cannot make it, because this user has no setuid nvidia-modprobe"
    return exposed(*evidence, why, advice="run sudo nvidia-modprobe -u -c=0 on the host")


def device_majors() -> Dict[str, int]:
    """The major numbers of character devices by name; most containers see those of the host."""
    found = re.findall(r"^ *(\d{1,9}) (nvidia\S*)$", read("proc/devices"), re.MULTILINE)
    return {name: int(major) for major, name in found}


def describe_sleep() -> str:
    """How long the machine was suspended: the clock that counts suspends minus the one that does not."""
    asleep = abs(time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC))
    kept = re.search(r"PreserveVideoMemoryAllocations: (\d)", read("proc/driver/nvidia/params"))
    return f"{asleep:.0f} s in suspend since the boot, PreserveVideoMemoryAllocations {kept[1] if kept else 'unknown'}"


def exists(path: str) -> bool:
    return os.path.exists(Path(ROOT, path))  # also False if this user may not look there


def read(path: str) -> str:
    try:
        return Path(ROOT, path).read_text(errors="replace").strip()
    except OSError:
        return ""


DRIVER = "NVIDIA's driver, whose cuInit needs /dev/nvidia-uvm; a stub needs a file instead"


def driver(name: str, jobs: Tuple[Any, Any], expect: Expect, because: str, package: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect, because, "stand-in", DRIVER),
        treatment=Arm(jobs[1], completed(), "the device node exists", "stand-in", DRIVER),
        world_size=1,
        needs=Needs(packages={package: ">=2.1"} if package else {}, programs=("gcc",)),
        expected_s=(1.0, 1.0),
    )


UNKNOWN_ERROR = raised(r"CUDA unknown error - this may be due to an incorrectly set up environment")

probe = Probe(
    check=check,
    experiments=(
        driver(
            "node",
            (partial(ask_driver, uvm=False), partial(ask_driver, uvm=True)),
            symptom(r"NVML counts 1 GPU, and cuInit returns 999"),
            "the device node is missing: cuInit needs it, but NVML does not",
            "",
        ),
    ),
    variants=(
        driver(
            "torch",
            (partial(init_torch, uvm=False), partial(init_torch, uvm=True)),
            UNKNOWN_ERROR,
            "the device node is missing, and torch reports the 999 of cuInit as an unknown error",
            "torch",
        ),
        driver(
            "variable",
            (partial(init_torch, uvm=False, visible="0"), partial(init_torch, uvm=True, visible="0")),
            UNKNOWN_ERROR,
            "CUDA_VISIBLE_DEVICES=0 is set before the start, as the error suggests, but the device node is missing",
            "torch",
        ),
    ),
)
