"""CUDA needs the module nvidia_uvm and its device node; nvidia-smi needs neither, and so sees the GPUs without them.

The driver is a stub, built with gcc, that needs a file in place of /dev/nvidia-uvm: without it its cuInit returns
999, as that of the real driver does. A torch that is built with CUDA then says what it says on such a machine.
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
    """Build and load the stub; make the node, as `nvidia-modprobe -u -c=0` does, or do not."""
    try:
        ctypes.CDLL("libcuda.so.1")
        raise Unavailable("a real driver is on the loader's path here, and would be found instead of the stub")
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
    """What nvidia-smi uses, and what CUDA uses, of the same driver."""
    load_driver(ctx, uvm=uvm)
    driver = ctypes.CDLL("libcuda.so.1")
    count = ctypes.c_uint()
    assert driver.nvmlInit_v2() == 0
    assert driver.nvmlDeviceGetCount_v2(ctypes.byref(count)) == 0
    answer = ctypes.CDLL("libcuda.so.1").cuInit(0)
    if answer == 999:
        raise Symptom(f"NVML counts {count.value} GPU, and cuInit returns {answer}")
    assert answer == 100


def init_torch(ctx: Context, *, uvm: bool, visible: str = "") -> None:
    """A torch that is built with CUDA starts it, with or without CUDA_VISIBLE_DEVICES in the environment."""
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    else:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    load_driver(ctx, uvm=uvm)
    import torch

    if torch.version.cuda is None:
        raise Unavailable("this torch was built without CUDA and does not look for a driver")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "No CUDA GPUs are available" not in str(error):
            raise


# --- the check: the module nvidia_uvm, its node, and whether this machine has slept since it was started --------------

ROOT = Path("/")
ASK = "in a new process: python3 -c \"import ctypes; print(ctypes.CDLL('libcuda.so.1').cuInit(0))\"; 0 is right"


def check(params: Mapping[str, Any]) -> Finding:
    """Read /proc, /sys and /dev; whether CUDA starts is not tried, because that can load modules and take seconds."""
    if "microsoft" in platform.release().lower() or exists("dev/nvmap"):
        return unknown("WSL or a Jetson: its GPU does not use nvidia_uvm", advice=ASK)
    if not exists("proc/driver/nvidia/version"):
        return unknown("no NVIDIA driver in sight", advice="run this on the GPU node, and in the job's container")
    if not list(Path(ROOT, "dev").glob("nvidia[0-9]*")):
        return unknown("no /dev/nvidia0 either", advice="in a container: was it given a GPU? container-without-gpu")
    marks = (".dockerenv", "run/.containerenv", ".singularity.d")
    container = "KUBERNETES_SERVICE_HOST" in os.environ or any(map(exists, marks))
    loaded = exists("sys/module/nvidia_uvm")
    majors = device_majors()
    state = "loaded" if loaded else "not loaded" if exists("sys/module") else "unknown (no /sys)"
    evidence = [f"nvidia_uvm: {state}, {describe_sleep()}"]
    versions = {name: read(f"sys/module/{name}/version") for name in ("nvidia", "nvidia_uvm")}
    if all(versions.values()) and len(set(versions.values())) > 1:
        return exposed(*evidence, f"modules of two releases: {versions}", advice="reboot the host")
    try:
        node = Path(ROOT, "dev/nvidia-uvm").stat()
    except OSError:
        return without_node(evidence, container)
    if not stat.S_ISCHR(node.st_mode):
        return exposed(*evidence, "/dev/nvidia-uvm is not a device", advice="remove it, then nvidia-modprobe -u -c=0")
    if not loaded and not container:
        return unknown(*evidence, "the node is there without its module", advice=f"nvidia-modprobe -u -c=0, then {ASK}")
    if "nvidia-uvm" in majors and os.major(node.st_rdev) != majors["nvidia-uvm"]:
        why = f"/dev/nvidia-uvm has the major number {os.major(node.st_rdev)}, the driver {majors['nvidia-uvm']}"
        advice = "the module was loaded anew: make the node, or start the container, again"
        return exposed(*evidence, why, advice=advice)
    if not os.access(Path(ROOT, "dev/nvidia-uvm"), os.R_OK | os.W_OK):
        why = "this user may not read and write /dev/nvidia-uvm"
        return exposed(*evidence, why, advice="ls -l /dev/nvidia*; id; the device rules of the container or job")
    return unknown(*evidence, "module and node are there; their state after a suspend cannot be read", advice=ASK)


def without_node(evidence: List[str], container: bool) -> Finding:
    capabilities = re.search(r"^CapEff:\s*([0-9a-f]+)$", read("proc/self/status"), re.MULTILINE)
    if capabilities and int(capabilities[1], 16) >> 21 & 1 and container:  # CAP_SYS_ADMIN
        why = "no /dev/nvidia-uvm in this container, which is privileged and may make it"
        return unknown(*evidence, why, advice=ASK)
    if container:
        why = "no /dev/nvidia-uvm in this container, and it has no right to make one"
        return exposed(*evidence, why, advice="nvidia-modprobe -u -c=0 on the host, then start the container again")
    path = shutil.which("nvidia-modprobe", path=f"{os.environ.get('PATH', '')}:/usr/bin:/run/current-system/sw/bin")
    if os.geteuid() == 0 or (path and os.stat(path).st_mode & stat.S_ISUID):
        why = f"no /dev/nvidia-uvm yet: CUDA may make it at its first start, with {path or 'the rights of root'}"
        return unknown(*evidence, why, advice=ASK)
    why = "no /dev/nvidia-uvm, and no nvidia-modprobe that this user may use: CUDA cannot make it"
    return exposed(*evidence, why, advice="on the host: sudo nvidia-modprobe -u -c=0")


def device_majors() -> Dict[str, int]:
    """Names of character devices and their numbers. In most containers, too, they are the host's."""
    found = re.findall(r"^ *(\d{1,9}) (nvidia\S*)$", read("proc/devices"), re.MULTILINE)
    return {name: int(major) for major, name in found}


def describe_sleep() -> str:
    """The clock that counts sleep, less the one that does not."""
    asleep = abs(time.clock_gettime(time.CLOCK_BOOTTIME) - time.clock_gettime(time.CLOCK_MONOTONIC))
    kept = re.search(r"PreserveVideoMemoryAllocations: (\d)", read("proc/driver/nvidia/params"))
    return f"{asleep:.0f} s in suspend since the boot, PreserveVideoMemoryAllocations {kept[1] if kept else 'unknown'}"


def exists(path: str) -> bool:
    return os.path.exists(Path(ROOT, path))  # False, too, where it may not be asked


def read(path: str) -> str:
    try:
        return Path(ROOT, path).read_text(errors="replace").strip()
    except OSError:
        return ""


DRIVER = "NVIDIA's driver, whose cuInit needs /dev/nvidia-uvm: a stub that needs a file"


def driver(name: str, jobs: Tuple[Any, Any], expect: Expect, because: str, package: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect, because, "stand-in", DRIVER),
        treatment=Arm(jobs[1], completed(), "the node is there", "stand-in", DRIVER),
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
            "there is no node for CUDA, and NVML needs none",
            "",
        ),
    ),
    variants=(
        driver(
            "torch",
            (partial(init_torch, uvm=False), partial(init_torch, uvm=True)),
            UNKNOWN_ERROR,
            "there is no node, and torch translates 999",
            "torch",
        ),
        driver(
            "variable",
            (partial(init_torch, uvm=False, visible="0"), partial(init_torch, uvm=True, visible="0")),
            UNKNOWN_ERROR,
            "CUDA_VISIBLE_DEVICES=0 is set before the start, as the text suggests, and there is no node",
            "torch",
        ),
    ),
)
