"""NCCL uses an RDMA card, and every byte between card and GPU passes through the memory of the host.

Files of the kernel and the driver and two variables decide it. The check reads them on this machine; the models apply
the same rules to a made-up one.
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

# --- what NCCL asks, and what a machine answers ----------------------------------------------------------------------

OLD, NC, RENAMED = (f"sys/kernel/mm/memory_peers/{name}/version" for name in ("nv_mem", "nv_mem_nc", "nvidia-peermem"))
MODULE = "sys/module/nvidia_peermem/version"
LOOKS_FOR = (((2, 23), (OLD, NC, MODULE)), ((2, 22), (OLD, NC)), ((2, 9, 8), (OLD, RENAMED)))  # since; one is enough
OFF = ("0", "LOC")  # of NCCL_NET_GDR_LEVEL; a value that NCCL does not know, such as "sys", it ignores
ANY_DISTANCE = ("PHB", "SYS", "3", "4", "5")
DRIVER, KERNEL = "proc/driver/nvidia/version", "proc/sys/kernel/osrelease"

UNSET = "unset it, here and in nccl.conf, unless it is there against error 4 (ACS)"
LOAD = "on the host, on every node: sudo modprobe nvidia-peermem; or NVIDIA's open module on kernel 5.12 and newer"
ASK = "run once with NCCL_DEBUG=INFO and look for /GDRDMA behind `via NET/IB`"


def bridges(device: Path) -> Set[str]:
    """Below the host bridge: of /sys/devices/pci0000:37/0000:37:01.0/0000:38:00.0/0000:3a:00.0 two."""
    return set(re.findall(r"/([0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.\d)(?=/)", os.path.realpath(str(device))))


def look_at(root: Path) -> Tuple[List[str], int, int]:
    """Active RDMA ports, the number of GPUs, and of those that share a PCI switch, or a root port, with a card."""
    ports: List[str] = []
    gpus, cards = [], []
    for vendor in sorted(root.glob("sys/bus/pci/devices/*/vendor")):
        if file_text(vendor) == "0x10de" and file_text(vendor.parent / "class").startswith(("0x0300", "0x0302")):
            gpus.append(bridges(vendor.parent))
    for port in sorted(root.glob("sys/class/infiniband/*/ports/*")):
        layer = file_text(port / "link_layer")  # EFA's is another, and it needs a plugin
        if layer in ("InfiniBand", "Ethernet") and file_text(port / "state").endswith("ACTIVE"):
            ports.append(f"{port.parts[-3]}:{port.name}")
            cards.append(bridges(port.parent.parent / "device"))
    return ports, len(gpus), sum(any(gpu & card for card in cards) for gpu in gpus)


def against_dma_buf(root: Path, release: Tuple[int, ...], enabled: str) -> Iterator[str]:
    """Each reason for which this NCCL cannot register GPU memory through DMA-BUF here."""
    driver, kernel = file_text(root / DRIVER), file_text(root / KERNEL)
    if release and release < (2, 13):
        yield "this NCCL has no DMA-BUF, which 2.13 brought"
    if enabled == "0":
        yield "DMA-BUF is switched off by the variable"
    if driver and "Open Kernel Module" not in driver:
        yield "the driver is not NVIDIA's open kernel module, which DMA-BUF needs"
    if numbers(kernel) and numbers(kernel) < (5, 12) and ".el" not in kernel:  # Red Hat carries changes back
        yield f"kernel {kernel}, and DMA-BUF needs 5.12"


def refusal(root: Path, release: Tuple[int, ...], level: str, dma_buf: str = "") -> Tuple[str, str]:
    """Why NCCL would not use GPUDirect RDMA on a machine, and what to do; empty where it would."""
    files = next((files for since, files in LOOKS_FOR if since <= release), (OLD, NC, MODULE))
    obstacles = list(against_dma_buf(root, release, dma_buf))
    if level in OFF:
        return f"NCCL_NET_GDR_LEVEL={level} switches GPUDirect RDMA off", UNSET
    if obstacles and not any((root / file).exists() for file in files):
        is_loaded = (root / MODULE).exists()
        why = "there is no %s; %s" % (" and no ".join(f"/{file}" for file in files), "; ".join(obstacles))
        return why, "NCCL 2.23 or newer, which looks for the module" if is_loaded else LOAD
    if not look_at(root)[2] and level not in ANY_DISTANCE:
        return "no GPU has a PCI switch in common with a card: NCCL leaves it off, unless C2C joins them (Grace)", ASK
    return "", ""


# --- the jobs --------------------------------------------------------------------------------------------------------


def reduce_over_card(ctx: Context) -> None:
    """Both arms are this job. They differ in NCCL_NET_GDR_LEVEL alone, which NCCL reads from the environment."""
    if not look_at(Path("/"))[0]:
        raise Unavailable("no active InfiniBand or RoCE port on this machine")
    log = ctx.path(f"nccl-{ctx.rank}.log")
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT,NET", NCCL_DEBUG_FILE=log)
    import torch

    dist = ctx.init_process_group(timeout_s=45)
    total = torch.full((1 << 20,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 3).all().item()
    printed = file_text(log)
    connections = sorted(set(re.findall(r"\[(?:send|receive)\] via NET/IB/\S+", printed)))
    if "GPU Direct RDMA Enabled for HCA" not in printed or "GeForce" in torch.cuda.get_device_name():
        raise Unavailable("cards or GPUs here cannot do GPUDirect RDMA, so switching it off shows nothing")
    ctx.reached()
    ctx.note(connections=connections)
    assert connections, "no connection over a card"
    if not any("/GDRDMA" in line for line in connections):
        raise Symptom("NCCL connects without GDRDMA: %s" % connections[0])


def write(path: Path, content: str) -> None:
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
    """What NCCL of this release would decide, by /sys and /proc of a made-up node with one GPU and one card."""
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
    """Whether NCCL may find a network plugin, such as that of HPC-X, which looks for files of its own."""
    folders = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    is_known = "libnccl-net" in file_text(root / "etc/ld.so.cache")
    return is_known or any(any(Path(at).glob("libnccl-net*")) for at in folders)


def check(params: Mapping[str, Any]) -> Finding:
    """Whether NCCL could use GPUDirect RDMA on this node: module, DMA-BUF, variables, PCI tree."""
    root, release = Path(str(params["root"])), nccl_release()
    settings = {name: nccl_setting(name) for name in NAMES}
    level, dma_buf, net, plugin, disabled = (settings[name][0] for name in NAMES)
    evidence = [f"{name}={value} ({origin})" for name, (value, origin) in settings.items() if value]
    try:
        (ports, gpus, near), may_differ = look_at(root), has_plugin(root)
        found = [file for file in (OLD, NC, RENAMED, MODULE) if (root / file).exists()]
        models = [file_text(model) for model in root.glob("proc/driver/nvidia/gpus/*/information")]
    except (OSError, ValueError) as error:
        return unknown(*evidence, f"{root} cannot be read: {type(error).__name__}")
    if not ports or not gpus:
        none = "NVIDIA GPU on the PCI bus" if ports else "active InfiniBand or RoCE port"
        return unknown(*evidence, f"no {none} is visible here, so nothing is known of the nodes that have them")
    evidence += [
        "active ports: %s" % ", ".join(ports[:16]),
        f"{near} of {gpus} GPUs have a PCI switch or port in common with a card",
        "peer memory: %s" % (", ".join(f"/{file}" for file in found) or "none of the files that NCCL looks for"),
    ]
    if net not in ("", "IB", "ib") or plugin not in ("", "none"):
        return unknown(*evidence, "another network is asked for, with rules of its own", advice=ASK)
    if disabled not in ("", "0"):
        return unknown(*evidence, "NCCL does not use these ports at all, so it goes over TCP")
    if models and all("GeForce" in model for model in models):
        return unknown(*evidence, "the driver refuses GPUDirect RDMA for GeForce cards")
    why, advice = refusal(root, release, level, dma_buf)
    if found and why and advice not in (UNSET, ASK) and (may_differ or not release):
        return unknown(*evidence, "NCCL of no package, or a network plugin: what it looks for is not known", advice=ASK)
    if why and (near or level in ANY_DISTANCE):
        return exposed(*evidence, why, advice=advice)
    evidence += [why] if why else ["nothing here forbids it; whether card and libibverbs can do DMA-BUF is not visible"]
    return unknown(*evidence, "other nodes may differ, and what NCCL really uses only its log shows", advice=ASK)


# --- the experiments -------------------------------------------------------------------------------------------------

RULES = "NCCL, driver and kernel of a node: NCCL's rules in Python, applied to made-up files"


def pair(name: str, why: str, because: str, fix: str, wrong: Mapping[str, Any], **right: Any) -> Experiment:
    """`right` is the one keyword that the treatment arm has otherwise."""
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


LOADED, NOT_LOADED = "nvidia_peermem is loaded", "no peer memory module, and the driver is not the open one"
OPEN, NO_FILE, SYS = "Open Kernel Module for x86_64", "there is no /sys/", "NCCL_NET_GDR_LEVEL=SYS"
HAS_MODULE, OLD_NCCL, FLAT = {"peer_memory": MODULE}, (2, 22, 3), "the machine shows no PCI switch"

probe = Probe(
    params={"root": Param("path", "where sys and proc are", "/")},
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
        pair("open-module", NO_FILE, NOT_LOADED, "the open driver, on kernel 6.8", {}, driver=OPEN),
        pair("release", NO_FILE, "2.22.3", "2.23.4", {**HAS_MODULE, "release": OLD_NCCL}, release=(2, 23, 4)),
        pair("level", "NCCL_NET_GDR_LEVEL=LOC", "LOC", "not set", {**HAS_MODULE, "level": "LOC"}, level=""),
        pair("level-sys", NO_FILE, f"{NOT_LOADED}; {SYS}", LOADED, {"level": "SYS"}, peer_memory=MODULE),
        pair("virtual-machine", "no GPU has a PCI", FLAT, SYS, {**HAS_MODULE, "has_switch": False}, level="SYS"),
    ),
)
