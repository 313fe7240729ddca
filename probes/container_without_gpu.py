"""A container that was never given a GPU: the driver's libraries were not mounted into it.

The driver is a stub, built with gcc, and the container is a mount namespace with an empty library folder. What the
NVIDIA runtime does before the first process, a bind mount of the libraries that two variables select, is done here;
torch, pynvml and the loader then find them, or say what they say in a container without a GPU.
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
    """What the runtime puts into a container: nothing with runc, or where the list of devices is empty or void."""
    own_user()
    for library, (capability, source) in DRIVER.items():
        if loads(library):
            raise Unavailable(f"{library} of a real driver is on the loader's path here, and would be found instead")
        host, container = ctx.path(f"host-{capability}"), ctx.path(f"lib-{capability}")
        Path(host).mkdir()
        Path(container).mkdir()
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", f"{host}/{library}", "-xc", "-"]
        subprocess.run(command, input=source, text=True, check=True)
        if runtime == "nvidia" and devices not in ("", "void") and capability in capabilities.split(","):
            bind_over(host, container)
    for path in Path().resolve().glob("lib-*/*"):  # in the place of ldconfig, which only root may run
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    ctx.reached()


def count_gpus(ctx: Context, *, runtime: str = "nvidia", devices: str = "all") -> None:
    """torch asks the driver's NVML how many GPUs there are."""
    start_container(ctx, runtime, devices, "compute,utility")
    import torch

    assert torch.cuda._raw_device_count_nvml() == 1


def count_with_pynvml(ctx: Context, *, devices: str) -> None:
    """A program that asks pynvml, such as a monitor or an inference engine."""
    start_container(ctx, "nvidia", devices, "compute,utility")
    pynvml = importlib.import_module("pynvml")
    pynvml.nvmlInit()
    assert pynvml.nvmlDeviceGetCount() == 1


def start_cuda(ctx: Context, *, capabilities: str) -> None:
    """nvidia-smi's library is there; CUDA's own is there if it is among the capabilities."""
    start_container(ctx, "nvidia", "all", capabilities)
    assert ctypes.CDLL("libnvidia-ml.so.1").nvmlInit() == 0
    assert ctypes.CDLL("libcuda.so.1").cuInit(0) == 100


def init_torch(ctx: Context, *, devices: str) -> None:
    """A torch that has CUDA looks for the driver, and next for a device, which the stub has not."""
    start_container(ctx, "nvidia", devices, "compute,utility")
    import torch

    if torch.version.cuda is None:
        raise Unavailable("this torch was built without CUDA and does not look for a driver")
    try:
        torch.cuda.init()
    except RuntimeError as error:
        if "No CUDA GPUs are available" not in str(error):
            raise


def loads(library: str) -> bool:
    """Whether the loader of this process finds it. This starts no CUDA."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


# --- the check: inside a container, was it given a GPU? on a host, could it give one? --------------------------------

ROOT = Path("/")
PLACES = ("usr/local/nvidia/lib64", "usr/lib64", "usr/lib/*-linux-gnu", "run/opengl-driver/lib", ".singularity.d/libs")
ENGINES = ("docker", "podman", "nerdctl", "containerd", "crio")
TOOLKIT = ("nvidia-container-runtime-hook", "nvidia-container-runtime", "nvidia-cdi-hook", "nvidia-ctk")
ASK = "if the job needs a GPU, ask for it at the start: docker --gpus all, nvidia.com/gpu in a pod, apptainer --nv"
INSTALL = "install nvidia-container-toolkit, configure the engine with nvidia-ctk, restart its daemon"


def check(params: Mapping[str, Any]) -> Finding:
    """Look for GPU nodes, the driver's libraries and, through /proc and /sys, the driver and the cards of the host."""
    if "microsoft" in os.uname().release.lower() or Path(ROOT, "dev/nvmap").exists():
        return unknown("WSL or a Jetson: its GPU has other device nodes", advice="run nvidia-smi where the job runs")
    place, host = container(), describe_host()
    if not place:
        return check_host(host)
    nodes = sorted(path.name for path in Path(ROOT, "dev").glob("nvidia*") if re.search(r"(\d|ctl|uvm)$", path.name))
    names = ", ".join(nodes) or "no /dev/nvidia*"
    if not any(re.search(r"nvidia\d+$", name) for name in nodes):
        variable = f"NVIDIA_VISIBLE_DEVICES={os.environ.get('NVIDIA_VISIBLE_DEVICES', '(not set)')}"
        if host:
            advice = ASK if host[0].startswith("driver") else "load the driver on the host first"
            return exposed(place, f"no GPU node here: {names}", *host, variable, advice=advice)
        why = "no driver and no NVIDIA card of the host to be seen: it has none, or a sandbox hides them"
        return unknown(place, f"no GPU node here: {names}", why, advice="run nvidia-smi on the host")
    lacking = [library for library in DRIVER if not loads(library)]
    copies = [str(path) for name in PLACES for library in lacking for path in ROOT.glob(f"{name}/{library}*")]
    if copies:
        return unknown(place, names, f"{copies[0]} is not on the path of the loader of this process: LD_LIBRARY_PATH?")
    if lacking:
        why = f"no {' and no '.join(lacking)}: the libraries of the driver were not mounted"
        return exposed(place, names, why, advice="apptainer --nv, or NVIDIA_DRIVER_CAPABILITIES=compute,utility")
    refused = [name for name in nodes if refuses(Path(ROOT, "dev", name))]
    if refused or not {"nvidiactl", "nvidia-uvm"} <= set(nodes):
        why = f"may not be opened: {', '.join(refused) or 'none'}; CUDA needs nvidiactl and nvidia-uvm as well"
        return unknown(place, names, why, advice="run nvidia-smi here and on the host, or kb verify container-lost-gpu")
    return clear(place, f"{names}: nvidiactl opens, the modes of the rest allow it; {' and '.join(DRIVER)} load")


def check_host(host: List[str]) -> Finding:
    """Outside: is there a driver for containers to use, and something that hands it to them?"""
    if not host:
        return unknown("no NVIDIA driver or card here", advice="run this inside the container, or on its host")
    if not host[0].startswith("driver"):
        return exposed(*host, "no NVIDIA kernel module is loaded: no container gets the card", advice="load the driver")
    path = f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin:/usr/sbin:/usr/local/nvidia/toolkit"
    engines = [name for name in ENGINES if shutil.which(name, path=path)]
    files = [str(file) for name in ("etc/cdi", "var/run/cdi") for file in Path(ROOT, name).glob("*nvidia*")]
    parts = [name for name in TOOLKIT if shutil.which(name, path=path)] + files
    others = any(Path(ROOT, name).exists() for name in ("snap/docker", "var/lib/kubelet"))  # with parts of their own
    if engines and not parts and not others:
        why = f"{', '.join(engines)}: no part of the NVIDIA Container Toolkit, and no CDI file of NVIDIA's"
        return exposed(*host, why, advice=INSTALL)
    why = "whether the daemon knows them, and whether a command asks for a GPU, cannot be seen here"
    seen = ", ".join(parts) or "nothing seen"
    return unknown(*host, f"for containers: {seen}", why, advice="run this in the container")


def container() -> str:
    """What shows that this is a container, or nothing."""
    marks = [name for name in (".dockerenv", "run/.containerenv", ".singularity.d") if Path(ROOT, name).exists()]
    marks += [name for name in ("KUBERNETES_SERVICE_HOST",) if name in os.environ]
    return f"inside a container: {marks[0]}" if marks else ""


def describe_host() -> List[str]:
    """What /proc and /sys say of the driver and of NVIDIA's cards: they are the host's, in most containers too."""
    lines = []
    if Path(ROOT, "proc/driver/nvidia/version").exists() or Path(ROOT, "sys/module/nvidia").exists():
        lines.append("driver of the host: its kernel module is loaded")
    displays = [path for path in ROOT.glob("sys/bus/pci/devices/*") if read(path, "class").startswith("0x03")]
    cards = [card for card in displays if read(card, "vendor").strip() == "0x10de"]
    return lines + ([f"NVIDIA cards on the PCI bus: {len(cards)}"] if cards else [])


def refuses(node: Path) -> bool:
    """Whether a node may not be opened; of all only nvidiactl is opened, which starts no card."""
    if node.name == "nvidiactl":
        try:
            os.close(os.open(node, os.O_RDWR))
        except OSError:
            return True
    return not os.access(node, os.R_OK | os.W_OK)


def read(folder: Path, name: str) -> str:
    """A file of /sys; nothing where it cannot be read."""
    try:
        return Path(folder, name).read_text(errors="replace")
    except OSError:
        return ""


STANDS_FOR = "the NVIDIA Container Toolkit, which mounts the driver's libraries: a bind mount of stubs"


def given(
    name: str, job: Callable[..., None], keyword: str, values: Tuple[str, str], pattern: str, because: str, package: str
) -> Experiment:
    fails, works = (partial(job, **{keyword: value}) for value in values)
    return Experiment(
        name=name,
        control=Arm(fails, raised(pattern), because, "stand-in", STANDS_FOR),
        treatment=Arm(works, completed(), "the runtime mounts the libraries of the driver", "stand-in", STANDS_FOR),
        world_size=1,
        needs=Needs(packages={package: ""} if package else {}, programs=("gcc",)),
    )


NO_NVML, NO_CUDA = (rf"{name}\.so\.1: cannot open shared object file" for name in ("libnvidia-ml", "libcuda"))
VOID = "no device is asked for, so the runtime adds nothing"
ALONE = "NVIDIA_VISIBLE_DEVICES=all is set, and runc does not read it"
UTILITY = "utility brings NVML and nvidia-smi, and no CUDA"
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
