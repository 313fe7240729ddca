"""NCCL uses an RDMA card, but without GPUDirect RDMA every byte between card and GPU passes through host memory.

Files of the kernel and the driver and two variables decide whether NCCL uses it. The check reads them on this machine;
the models apply the same rules to a made-up machine.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any, Iterator, List, Mapping, Set, Tuple

from kb.host import file_text
from kb.nccl import nccl_release, nccl_setting
from kb.packages import numbers
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    symptom,
    unknown,
)

# --- the rules of NCCL, and the files that they read ------------------------------------------------------------------

OLD, NC, RENAMED = (f"sys/kernel/mm/memory_peers/{name}/version" for name in ("nv_mem", "nv_mem_nc", "nvidia-peermem"))
MODULE = "sys/module/nvidia_peermem/version"
LOOKS_FOR = (
    ((2, 23), (OLD, NC, MODULE)),
    ((2, 22), (OLD, NC)),
    ((2, 9, 8), (OLD, RENAMED)),
)  # by first release; one file is enough
OFF = ("0", "LOC")  # NCCL ignores unknown values, such as "sys"
ANY_DISTANCE = ("PHB", "SYS", "3", "4", "5")
DRIVER, KERNEL = "proc/driver/nvidia/version", "proc/sys/kernel/osrelease"

UNSET = "unset it, also in nccl.conf, unless somebody set it to avoid error 4 (ACS)"
LOAD = "on every host run sudo modprobe nvidia-peermem, or use NVIDIA's open kernel module on kernel 5.12 or newer"
LOOK = "run the job once with NCCL_DEBUG=INFO and look for /GDRDMA after `via NET/IB`"


def bridges(device: Path) -> Set[str]:
    """The PCI bridges above a device; /sys/devices/pci0000:37/0000:37:01.0/0000:38:00.0/0000:3a:00.0 has two."""
    return set(re.findall(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)(?=/)", os.path.realpath(str(device))))


def look_at(root: Path) -> Tuple[List[str], int, int]:
    """Returns the active RDMA ports, the number of GPUs, and how many GPUs share a PCI switch or port with a card."""
    ports: List[str] = []
    gpus, cards = [], []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if file_text(vendor) == "0x10de" and file_text(vendor.parent / "class").startswith(("0x0300", "0x0302")):
            gpus.append(bridges(vendor.parent))
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        layer = file_text(port / "link_layer")  # EFA has another layer, and needs a plugin
        if layer in ("InfiniBand", "Ethernet") and file_text(port / "state").endswith("ACTIVE"):
            ports.append(f"{port.parts[-3]}:{port.name}")
            cards.append(bridges(port.parent.parent / "device"))
    return ports, len(gpus), sum(any(gpu & card for card in cards) for gpu in gpus)


def against_dma_buf(root: Path, release: Tuple[int, ...], enabled: str) -> Iterator[str]:
    """Yields each reason why this NCCL cannot register GPU memory through DMA-BUF here."""
    driver, kernel = file_text(root / DRIVER), file_text(root / KERNEL)
    if release and release < (2, 13):
        yield "this NCCL is older than 2.13, which introduced DMA-BUF"
    if enabled == "0":
        yield "NCCL_DMABUF_ENABLE=0 switches DMA-BUF off"
    if driver and "Open Kernel Module" not in driver:
        yield "the driver is not NVIDIA's open kernel module, which DMA-BUF needs"
    if numbers(kernel) and numbers(kernel) < (5, 12) and ".el" not in kernel:  # Red Hat backports it
        yield f"this kernel is {kernel}, but DMA-BUF needs 5.12"


def refusal(root: Path, release: Tuple[int, ...], level: str, dma_buf: str = "") -> Tuple[str, str]:
    """Why NCCL would not use GPUDirect RDMA below `root`, and the advice; both are empty if it would."""
    files = next((files for since, files in LOOKS_FOR if since <= release), (OLD, NC, MODULE))
    obstacles = list(against_dma_buf(root, release, dma_buf))
    if level in OFF:
        return f"NCCL_NET_GDR_LEVEL={level} switches GPUDirect RDMA off", UNSET
    if obstacles and not any((root / file).exists() for file in files):
        is_loaded = (root / MODULE).exists()
        why = "there is no %s; %s" % (" and no ".join(f"/{file}" for file in files), "; ".join(obstacles))
        return why, "install NCCL 2.23 or newer, which looks for the loaded module" if is_loaded else LOAD
    if not look_at(root)[2] and level not in ANY_DISTANCE:
        why = "no GPU has a PCI switch in common with a card, so NCCL leaves it off, except on Grace (C2C)"
        return why, LOOK
    return "", ""


# --- the jobs --------------------------------------------------------------------------------------------------------


def reduce_over_card(ctx: Context) -> None:
    """Runs an all-reduce over the card; the arms differ only in the variable NCCL_NET_GDR_LEVEL."""
    if not look_at(Path("/"))[0]:
        raise Unavailable("this machine has no active InfiniBand or RoCE port")
    log = ctx.path(f"nccl-{ctx.rank}.log")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log)
    import torch

    dist = ctx.init_process_group(timeout_s=45)
    total = torch.full((1 << 20,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 3).all().item()
    log_text = file_text(log)
    connections = sorted(set(re.findall(r"\[(?:send|receive)\] via NET/IB/\S+", log_text)))
    if "GPU Direct RDMA Enabled for HCA" not in log_text or "GeForce" in torch.cuda.get_device_name():
        raise Unavailable("the cards or GPUs here cannot do GPUDirect RDMA, so switching it off changes nothing")
    ctx.reached()
    ctx.note(connections=connections)
    assert connections, "NCCL made no connection over a card"
    if not any("/GDRDMA" in line for line in connections):
        raise Symptom("NCCL connects without GDRDMA: %s" % connections[0])


def write(path: Path, content: str) -> None:
    """Writes a line to a file and makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content + "\n")


def connect(
    ctx: Context,
    *,
    peer_memory: str = "",
    release: Tuple[int, ...] = (2, 27, 7),
    driver: str = "x86_64 Kernel Module",
    level: str = "",
    has_switch: bool = True,
) -> None:
    """Makes /sys and /proc of a node with one GPU and one card, and applies the rules of this NCCL release to them."""
    root, above = ctx.dir, "pci0000:37/0000:37:01.0/0000:38:00.0" if has_switch else "pci0000:00"
    gpu, card = (root / f"sys/devices/{above}/{name}" for name in ("0000:39:00.0", "0000:3a:00.0"))
    write(gpu / "vendor", "0x10de")
    write(gpu / "class", "0x030200")
    write(card / "infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    write(card / "infiniband/mlx5_0/ports/1/link_layer", "InfiniBand")
    (card / "infiniband/mlx5_0/device").symlink_to(card)
    for link, to in ((f"bus/pci/devices/{gpu.name}", gpu), ("class/infiniband/mlx5_0", card / "infiniband/mlx5_0")):
        (root / "sys" / link).parent.mkdir(parents=True)
        (root / "sys" / link).symlink_to(to)
    write(root / DRIVER, f"NVRM version: NVIDIA UNIX {driver}  580.95.05  Release Build")
    write(root / KERNEL, "6.8.0-90-generic")
    if peer_memory:
        write(root / peer_memory, "580.95.05")
    ctx.reached()
    why, _ = refusal(root, release, level)
    if why:
        raise Symptom("NCCL %s connects without GDRDMA: %s" % (".".join(map(str, release)), why))


# --- the check -------------------------------------------------------------------------------------------------------

NAMES = ("NCCL_NET_GDR_LEVEL", "NCCL_DMABUF_ENABLE", "NCCL_NET", "NCCL_NET_PLUGIN", "NCCL_IB_DISABLE")


def has_plugin(root: Path) -> bool:
    """Can NCCL find a network plugin? One such as HPC-X's looks for different files."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    is_cached = "libnccl-net" in file_text(root / "etc/ld.so.cache")
    return is_cached or any(any(Path(folder).glob("libnccl-net*")) for folder in folders)


def check(params: Mapping[str, Any]) -> Finding:
    """Do the module, DMA-BUF, the variables and the PCI tree of this node allow GPUDirect RDMA?"""
    root, release = Path(str(params["root"])), nccl_release()
    settings = {name: nccl_setting(name) for name in NAMES}
    level, dma_buf, net, plugin, disabled = (settings[name][0] for name in NAMES)
    evidence = [f"{name}={value} ({origin})" for name, (value, origin) in settings.items() if value]
    try:
        (ports, gpus, near), may_differ = look_at(root), has_plugin(root)
        found = [file for file in (OLD, NC, RENAMED, MODULE) if (root / file).exists()]
        models = [file_text(model) for model in root.glob("proc/driver/nvidia/gpus/*/information")]
    except (OSError, ValueError) as error:
        return unknown(*evidence, f"kb cannot read {root}: {type(error).__name__}")
    if not ports or not gpus:
        missing = "NVIDIA GPU on the PCI bus" if ports else "active InfiniBand or RoCE port"
        return unknown(*evidence, f"this node shows no {missing}", advice="run this on a node that has both")
    evidence += [
        "active ports: %s" % ", ".join(ports[:16]),
        f"{near} of {gpus} GPUs have a PCI switch or port in common with a card",
        "peer memory module: %s" % (", ".join(f"/{file}" for file in found) or "none of the files that NCCL looks for"),
    ]
    if net not in ("", "IB", "ib") or plugin not in ("", "none"):
        return unknown(*evidence, "the settings select another network or plugin, which has its own rules", advice=LOOK)
    if disabled not in ("", "0"):
        return unknown(*evidence, "NCCL_IB_DISABLE is set, so NCCL uses TCP instead of these ports")
    if models and all("GeForce" in model for model in models):
        return unknown(*evidence, "the driver refuses GPUDirect RDMA for GeForce cards")
    why, advice = refusal(root, release, level, dma_buf)
    if found and why and advice not in (UNSET, LOOK) and (may_differ or not release):
        unclear = "kb does not know which files this NCCL looks for: its release is unknown, or it may load a plugin"
        return unknown(*evidence, unclear, advice=LOOK)
    if why and (near or level in ANY_DISTANCE):
        return exposed(*evidence, why, advice=advice)
    evidence += (
        [why] if why else ["nothing here forbids it, but kb cannot see whether card and libibverbs can do DMA-BUF"]
    )
    return unknown(*evidence, "other nodes may differ, and only NCCL's log shows what it really uses", advice=LOOK)


# --- the experiments -------------------------------------------------------------------------------------------------

RULES = "NCCL with driver and kernel of a node; the probe applies NCCL's rules, in Python, to made-up files"


def pair(name: str, why: str, because: str, fix: str, wrong: Mapping[str, Any], **right: Any) -> Experiment:
    """Returns a model experiment; `right` is the one keyword that differs in the treatment arm."""
    without = symptom(r"NCCL [\d.]+ connects without GDRDMA: " + why)
    return Experiment(
        name=name,
        control=Arm(partial(connect, **wrong), without, because, "model", RULES),
        treatment=Arm(partial(connect, **{**wrong, **right}), completed(), fix, "model", RULES),
        world_size=1,
        needs=Needs(packages={}),
        expected_s=(0.2, 0.2),
    )


def on_card(level: str, expect: Expect) -> Arm:
    env = {"NCCL_NET": "IB", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET_GDR_LEVEL": level}
    return Arm(reduce_over_card, expect, f"NCCL_NET_GDR_LEVEL={level}", "hardware", env=env)


LOADED = "nvidia_peermem is loaded"
NOT_LOADED = "no peer memory module is loaded, and the driver is not the open kernel module"
OPEN, NO_FILE, SYS = "Open Kernel Module for x86_64", "there is no /sys/", "NCCL_NET_GDR_LEVEL=SYS"
HAS_MODULE, OLD_NCCL, FLAT = {"peer_memory": MODULE}, (2, 22, 3), "the machine shows no PCI switch"

probe = Probe(
    params={"root": Param("path", "the folder that has sys and proc, for the check", "/")},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=on_card("LOC", symptom(r"NCCL connects without GDRDMA: \[(send|receive)\] via NET/IB/")),
            treatment=on_card("SYS", completed()),
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=120,
            settle_s=10,
            expected_s=(20, 20),
        ),
        pair("module", NO_FILE, NOT_LOADED, LOADED, {}, peer_memory=MODULE),
    ),
    variants=(
        pair(
            "open-module", NO_FILE, NOT_LOADED, "the driver is the open kernel module, on kernel 6.8", {}, driver=OPEN
        ),
        pair(
            "release",
            NO_FILE,
            "NCCL is 2.22.3",
            "NCCL is 2.23.4",
            {**HAS_MODULE, "release": OLD_NCCL},
            release=(2, 23, 4),
        ),
        pair(
            "level",
            "NCCL_NET_GDR_LEVEL=LOC",
            "NCCL_NET_GDR_LEVEL is LOC",
            "the variable is not set",
            {**HAS_MODULE, "level": "LOC"},
            level="",
        ),
        pair("level-sys", NO_FILE, f"{NOT_LOADED}; {SYS}", LOADED, {"level": "SYS"}, peer_memory=MODULE),
        pair("virtual-machine", "no GPU has a PCI", FLAT, SYS, {**HAS_MODULE, "has_switch": False}, level="SYS"),
    ),
)
