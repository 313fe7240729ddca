"""A container never got a GPU, because the runtime did not mount the driver's libraries into it.

The driver is a stub, built with gcc, and the container is a mount namespace with an empty library folder. Like the
NVIDIA runtime, the probe bind-mounts the libraries that two variables select. torch, pynvml and the loader then find
them, or fail as they do in a container without a GPU.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
import shutil
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple

from kb.namespaces import bind_over, own_user
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)

NVML = """
int nvmlInit(void) { return 0; }
int nvmlInitWithFlags(unsigned flags) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
"""
CUDA = """
int cuDriverGetVersion(int *version) { *version = 99000; return 0; }
int cuInit(unsigned flags) { return 100; } /* CUDA_ERROR_NO_DEVICE */
"""
DRIVER = {"libnvidia-ml.so.1": ("utility", NVML), "libcuda.so.1": ("compute", CUDA)}


def start_container(ctx: Context, runtime: str, devices: str, capabilities: str) -> None:
    """Mounts what the runtime mounts into a container: nothing with runc, or if `devices` is empty or void."""
    own_user()
    for library, (capability, source) in DRIVER.items():
        if loads(library):
            raise Unavailable(f"the loader of this machine would find {library} of a real driver instead of the stub")
        host, container = ctx.path(f"host-{capability}"), ctx.path(f"lib-{capability}")
        Path(host).mkdir()
        Path(container).mkdir()
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", f"{host}/{library}", "-xc", "-"]
        subprocess.run(command, input=source, text=True, check=True)
        if runtime == "nvidia" and devices not in ("", "void") and capability in capabilities.split(","):
            bind_over(host, container)
    for path in Path().resolve().glob("lib-*/*"):  # in place of ldconfig, which only root may run
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctx.reached()


def count_gpus(ctx: Context, *, runtime: str = "nvidia", devices: str = "all") -> None:
    """Lets torch ask the driver's NVML for the number of GPUs."""
    start_container(ctx, runtime, devices, "compute,utility")
    import torch

    assert torch.cuda._raw_device_count_nvml() == 1


def count_with_pynvml(ctx: Context, *, devices: str) -> None:
    """Asks pynvml for the number of GPUs, like a monitor or an inference engine."""
    start_container(ctx, "nvidia", devices, "compute,utility")
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1


def start_cuda(ctx: Context, *, capabilities: str) -> None:
    """Loads NVML, which is there, and libcuda, which is there only if the capabilities include compute."""
    start_container(ctx, "nvidia", "all", capabilities)
    assert ctypes.CDLL("libnvidia-ml.so.1").nvmlInit() == 0
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 100


def init_torch(ctx: Context, *, devices: str) -> None:
    """Initialises CUDA in torch, which looks for the driver, then for a device, which the stub does not have."""
    start_container(ctx, "nvidia", devices, "compute,utility")
    import torch

    if torch.version.cuda is None:
        raise Unavailable("this torch was built without CUDA, so it does not look for a driver")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "No CUDA GPUs are available" not in str(error):
            raise


def loads(library: str) -> bool:
    """Does the loader of this process find the library? This does not start CUDA."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- the check: did this container get a GPU, or could this host give one to a container? ---------------------------

ROOT = Path("/")
DRIVER_LOADED = "the kernel module of the host's driver is loaded"
PLACES = ("usr/local/nvidia/lib64", "usr/lib64", "usr/lib/*-linux-gnu", "run/opengl-driver/lib", ".singularity.d/libs")
ENGINES = ("docker", "podman", "nerdctl", "containerd", "crio")
TOOLKIT = ("nvidia-container-runtime-hook", "nvidia-container-runtime", "nvidia-cdi-hook", "nvidia-ctk")
ASK = "if the job needs a GPU, start the container with one: docker --gpus all, nvidia.com/gpu in a pod, apptainer --nv"
INSTALL = "install nvidia-container-toolkit, configure the engine with nvidia-ctk, and restart its daemon"


def check(params: Mapping[str, Any]) -> Finding:
    """Has this container a GPU node and the driver's libraries? Reads the host's driver and cards in /proc and /sys."""
    if "microsoft" in os.uname().release.lower() or Path(ROOT, "dev/nvmap").exists():
        return unknown(
            "this is WSL or a Jetson, whose GPU has other device nodes", advice="run nvidia-smi where the job runs"
        )
    place, host = container(), describe_host()
    if not place:
        return check_host(host)
    nodes = sorted(path.name for path in Path(ROOT, "dev").glob("nvidia*") if re.search(r"(\d|ctl|uvm)$", path.name))
    names = ", ".join(nodes)
    if not any(re.search(r"nvidia\d+$", name) for name in nodes):
        variable = f"NVIDIA_VISIBLE_DEVICES={os.environ.get('NVIDIA_VISIBLE_DEVICES', '(not set)')}"
        message = f"there is no GPU node here, only {names}" if nodes else "there is no /dev/nvidia* here"
        if host:
            advice = ASK if host[0] == DRIVER_LOADED else "load the driver on the host first"
            return exposed(place, message, *host, variable, advice=advice)
        reason = "kb sees no driver and no NVIDIA card: the host has none, or a sandbox hides them"
        return unknown(place, message, reason, advice="run nvidia-smi on the host")
    lacking = [library for library in DRIVER if not loads(library)]
    copies = [str(path) for name in PLACES for library in lacking for path in ROOT.glob(f"{name}/{library}*")]
    if copies:
        message = f"the loader of this process does not search the folder of {copies[0]}"
        return unknown(place, names, message, advice="add the folder to LD_LIBRARY_PATH")
    if lacking:
        message = f"the driver's libraries were not mounted: no {' and no '.join(lacking)}"
        advice = "start the container with apptainer --nv, or with NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        return exposed(place, names, message, advice=advice)
    refused = [name for name in nodes if refuses(Path(ROOT, "dev", name))]
    absent = [name for name in ("nvidiactl", "nvidia-uvm") if name not in nodes]
    if refused or absent:
        messages = [f"kb may not open {', '.join(refused)}"] if refused else []
        messages += [f"CUDA also needs {' and '.join(absent)}, which is missing"] if absent else []
        advice = "run nvidia-smi here and on the host, or kb verify container-lost-gpu"
        return unknown(place, names, *messages, advice=advice)
    message = f"kb could open nvidiactl, file modes allow the other nodes, and {' and '.join(DRIVER)} load"
    return clear(place, names, message)


def check_host(host: List[str]) -> Finding:
    """Does this host have a driver, and a toolkit that gives it to containers?"""
    if not host:
        return unknown("kb found no NVIDIA driver or card", advice="run this inside the container, or on its host")
    if host[0] != DRIVER_LOADED:
        message = "no NVIDIA kernel module is loaded, so no container can use the card"
        return exposed(*host, message, advice="load the driver")
    path = f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/nvidia/toolkit"
    engines = [name for name in ENGINES if shutil.which(name, path=path)]
    files = [str(file) for name in ("etc/cdi", "var/run/cdi") for file in Path(ROOT, name).glob("*nvidia*")]
    parts = [name for name in TOOLKIT if shutil.which(name, path=path)] + files
    others = any(
        Path(ROOT, name).exists() for name in ("snap/docker", "var/lib/kubelet")
    )  # these bring their own parts
    if engines and not parts and not others:
        message = f"the host has {', '.join(engines)}, but no part of the NVIDIA Container Toolkit and no CDI file"
        return exposed(*host, message, advice=INSTALL)
    toolkit = f"the host has {', '.join(parts)}" if parts else "kb found no part of the NVIDIA Container Toolkit"
    message = "kb cannot tell whether the daemon uses a toolkit, and whether a command requests a GPU"
    return unknown(*host, toolkit, message, advice="run this in the container")


def container() -> str:
    """Returns what shows that this is a container, or an empty string."""
    marks = [name for name in (".dockerenv", "run/.containerenv", ".singularity.d") if Path(ROOT, name).exists()]
    marks += [name for name in ("KUBERNETES_SERVICE_HOST",) if name in os.environ]
    return f"inside a container: {marks[0]}" if marks else ""


def describe_host() -> List[str]:
    """Describes the driver and NVIDIA's cards by /proc and /sys, which are the host's in most containers too."""
    lines = []
    if Path(ROOT, "proc/driver/nvidia/version").exists() or Path(ROOT, "sys/module/nvidia").exists():
        lines.append(DRIVER_LOADED)
    displays = [path for path in ROOT.glob("sys/bus/pci/devices/*") if read(path, "class").startswith("0x03")]
    cards = [card for card in displays if read(card, "vendor").strip() == "0x10de"]
    return lines + ([f"the PCI bus has {len(cards)} NVIDIA card{'s' * (len(cards) > 1)}"] if cards else [])


def refuses(node: Path) -> bool:
    """May this process not open the node? Opens only nvidiactl, which starts no card."""
    if node.name == "nvidiactl":
        try:
            os.close(os.open(node, os.O_RDWR))
        except OSError:
            return True
    return not os.access(node, os.R_OK | os.W_OK)


def read(folder: Path, name: str) -> str:
    """Returns the text of a file of /sys, or an empty string if it cannot be read."""
    try:
        return Path(folder, name).read_text(errors="replace")
    except OSError:
        return ""


STANDS_FOR = "the NVIDIA Container Toolkit, which mounts the driver's libraries; a bind mount of stubs does so here"


def given(
    name: str, job: Callable[..., None], keyword: str, values: Tuple[str, str], pattern: str, because: str, package: str
) -> Experiment:
    fails, works = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(fails, raised(pattern), because, "stand-in", STANDS_FOR),
        treatment=Arm(works, completed(), "the runtime mounts the driver's libraries", "stand-in", STANDS_FOR),
        world_size=1,
        needs=Needs(packages={package: ""} if package else {}, programs=("gcc",)),
    )


NO_NVML, NO_CUDA = (rf"{name}\.so\.1: cannot open shared object file" for name in ("libnvidia-ml", "libcuda"))
VOID = "the container requests no device, so the runtime mounts no library"
ALONE = "NVIDIA_VISIBLE_DEVICES=all is set, but runc does not read it"
UTILITY = "the capability utility only mounts NVML and nvidia-smi, not libcuda"
PYNVML = "NVML Shared Library Not Found"

probe = Probe(
    check=check,
    experiments=(given("given", count_gpus, "devices", ("", "all"), NO_NVML, VOID, "torch"),),
    variants=(
        given("variable-alone", count_gpus, "runtime", ("runc", "nvidia"), NO_NVML, ALONE, "torch"),
        given("capabilities", start_cuda, "capabilities", ("utility", "compute,utility"), NO_CUDA, UTILITY, ""),
        given("torch", init_torch, "devices", ("", "all"), "Found no NVIDIA driver on your system", VOID, "torch"),
        given("pynvml", count_with_pynvml, "devices", ("void", "all"), PYNVML, VOID, "nvidia-ml-py"),
    ),
)
