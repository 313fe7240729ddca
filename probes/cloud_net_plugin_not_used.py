"""A cloud's network plugin for NCCL lies on the disk, and the job goes over TCP without it.

Small libraries stand for the plugin and its libfabric; the dynamic linker that finds them or not is the real one, and
so is NCCL up to 2.21, which opens its plugin before it looks for a GPU. Without it Python does as plugin_open.cc does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Tuple

from kb.host import file_text
from kb.nccl import nccl_release, nccl_setting
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

PLUGIN = "struct { const char *name; void *calls[24]; } ncclNetPlugin_v%d = {%s};"  # what NCCL looks for in the file
ASK_NCCL = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).ncclGetUniqueId(ctypes.create_string_buffer(128))"
ASK_LINKER = """
import ctypes, os, sys
for name in sys.argv[1:]:
    try:
        plugin = ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_LOCAL)
    except (OSError, ValueError) as error:
        print("NET/Plugin:", error)
        continue
    maps = [line.split(None, 5)[-1].strip() for line in open("/proc/self/maps") if "/" in line]
    files = [file for file in maps if os.path.basename(name) in file or "nccl-net" in file]
    print("NET/Plugin: opened", (files or [name])[0])
    for number in range(20, 1, -1):
        if hasattr(plugin, "ncclNetPlugin_v%d" % number):
            network = ctypes.c_char_p.in_dll(plugin, "ncclNetPlugin_v%d" % number).value or b""
            print("NET/Plugin: it has %s v%d" % (network.decode(errors="replace"), number))
    break
"""
LOADED = r"NET/Plugin: (Loaded net plugin KbFabric |it has KbFabric v[5-8]$)"  # of NCCL, by the rules of 2.21


def file_names(asked: str) -> List[str]:
    """The files that NCCL 2.21 and newer try, in this order, for a value of NCCL_NET_PLUGIN."""
    if asked.lower() == "none":
        return []
    words = [word for word in asked.split(",") if word]
    return [name for word in words for name in (word, f"libnccl-net-{word}.so")] or ["libnccl-net.so"]


# --- the job -------------------------------------------------------------------------------------------------------


def build(source: str, to: Path, *options: str) -> None:
    to.parent.mkdir(exist_ok=True)
    code = to.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(to), str(code), *options], check=True, timeout=20)


def start(
    ctx: Context,
    *,
    path: str = "ofi:efa",
    late: bool = False,
    asked: str = "",
    api: int = 5,
    provider: str = "",
    nccl: bool,
) -> None:
    """A process that opens its plugin as NCCL does. The cloud's, and another vendor's, are on the disk in every arm."""
    build("int fi_getinfo(void) { return 0; }", ctx.dir / "efa/libfabric.so.1", "-Wl,-soname,libfabric.so.1")
    for number, name, to in ((api, '"KbFabric"', "ofi"), (6, '"IBext"', "hpcx")):
        needs = [str(ctx.dir / "efa/libfabric.so.1")] if to == "ofi" else []
        build(PLUGIN % (number, name), ctx.dir / to / "libnccl-net.so", "-Wl,--no-as-needed", *needs)
    (ctx.dir / "ofi/libnccl-net-ofi.so").symlink_to("libnccl-net.so")
    folders = [*(str(ctx.dir / folder) for folder in path.split(":")), os.environ.get("LD_LIBRARY_PATH", "")]
    searched = ":".join(filter(None, folders))
    variables = {"NCCL_NET_PLUGIN": asked, "FI_PROVIDER": provider, "LD_LIBRARY_PATH": searched}
    if late or not path:
        del variables["LD_LIBRARY_PATH"]
    variables.update({"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_SOCKET_IFNAME": "lo"})
    others = {key: value for key, value in os.environ.items() if not key.startswith(("NCCL_", "FI_"))}
    set_late = f"import os; os.environ['LD_LIBRARY_PATH'] = {searched!r}" if late else ""
    library = metadata.distribution("nvidia-nccl-cu12").locate_file("nvidia/nccl/lib/libnccl.so.2") if nccl else ""
    command = [ASK_NCCL, str(library)] if nccl else [set_late + ASK_LINKER, *file_names(asked)]
    ctx.reached()
    ran = subprocess.run(
        [sys.executable, "-S", "-c", *command],
        env={**others, **{key: value for key, value in variables.items() if value}},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    said = [line for line in re.findall(r"NET/Plugin ?: .*", ran.stdout) if "CollNet" not in line]
    ctx.note(network_plugin=said)
    if not any(re.match(LOADED, line) for line in said):
        raise Symptom("the job goes on without the cloud's plugin; %s" % " ".join(said)[:300])


def reduce_over(ctx: Context) -> None:
    """Both arms are this job. They differ in NCCL_NET alone, which NCCL reads from the environment."""
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=60)
    total = torch.ones(1 << 10, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 1).all().item()


# --- the check -----------------------------------------------------------------------------------------------------

API_OF = {  # the plugin interfaces that a release looks for, oldest and newest; from 2.31 on any newer one
    (2, 14): (4, 6), (2, 19): (5, 7), (2, 20): (5, 8), (2, 24): (5, 9), (2, 26): (6, 10), (2, 28): (6, 11),
    (2, 30): (6, 12), (2, 31): (6, 20),
}  # fmt: skip
PLACES = (  # where the installers of the clouds put theirs
    "opt/amazon/*ofi-nccl/lib*", "opt/amazon/*ofi-nccl/lib/*", "opt/aws-ofi-nccl/lib*", "opt/aws-ofi-nccl/install/lib",
    "usr/local/gib/lib64", "usr/local/tcpx*/lib64", "usr/local/nvidia/lib64", "var/lib/tcpx*/lib64",
)  # fmt: skip
ON_PATH = "put its folder, and that of libfabric on AWS, into LD_LIBRARY_PATH before the job starts"
BUILT_IN = ("ib", "socket")


class Opened(NamedTuple):
    """What the dynamic linker gives a process for the names that NCCL would try."""

    file: str
    network: str
    apis: List[int]
    said: List[str]


def ask_linker(asked: str) -> Optional[Opened]:
    """In a process of its own, as a library runs code when it is opened. None where it does not answer."""
    try:
        ran = subprocess.run(
            [sys.executable, "-S", "-c", ASK_LINKER, *file_names(asked)], capture_output=True, timeout=0.7, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    said = re.findall(r"NET/Plugin: (.*)", ran.stdout.decode(errors="replace"))
    loaded = [each.groups() for line in said if (each := re.fullmatch(r"it has (.*) v(\d+)", line))]
    files = [line[7:] for line in said if line.startswith("opened ")]
    network = loaded[0][0] if loaded else ""
    return Opened(files[0] if files else "", network, [int(number) for _, number in loaded], said)


def efa_cards(root: Path) -> Tuple[List[str], Dict[str, str]]:
    """PCI addresses of EFA cards, and RDMA devices that drive one, each with its device node."""
    pci = [path.parent.name for path in root.glob("sys/bus/pci/devices/*/vendor") if is_efa(path.parent)]
    nodes = {file_text(path): path.parent.name for path in root.glob("sys/class/infiniband_verbs/*/ibdev")}
    devices = [path.parent for path in root.glob("sys/class/infiniband/*/device") if is_efa(path)]
    return sorted(pci), {path.name: nodes.get(path.name, "") for path in sorted(devices)}


def is_efa(device: Path) -> bool:
    return file_text(device / "vendor") == "0x1d0f" and file_text(device / "device").startswith("0xefa")


def is_switched_off(net: str, asked: str, release: Tuple[int, ...]) -> bool:
    empty = os.environ.get("NCCL_NET_PLUGIN") == "" and release >= (2, 27)  # NCCL's list of plugins is empty, too
    return empty or asked.lower() == "none" or net.lower() in BUILT_IN


def is_taken(asked: str, release: Tuple[int, ...]) -> bool:
    """Whether this NCCL tries NCCL_NET_PLUGIN as a path, where it is one."""
    return "/" not in asked or not release or (release >= (2, 21) and not (2, 27, 3) <= release < (2, 27, 5))


def contradictions(
    opened: Opened, asked_for: Tuple[str, str], release: Tuple[int, ...], cards: List[str], nodes: Optional[List[Path]]
) -> Iterator[Tuple[str, str]]:
    """What keeps the plugin that is opened from being used, and what to do.

    `asked_for` is NCCL_NET and FI_PROVIDER; `nodes` are the device nodes of EFA's devices that can be opened, None
    where there are no devices.
    """
    net, provider = asked_for
    network, efa = opened.network.lower(), bool(cards) or nodes is not None
    apis = next((each for since, each in reversed(list(API_OF.items())) if since <= release), None)
    if apis and not any(apis[0] <= number <= apis[1] for number in opened.apis):
        looks = f"NCCL {'.'.join(map(str, release))} looks for v{apis[0]} to v{apis[1]} in it"
        yield looks, "a plugin of the same age as NCCL"
    if efa and "libfabric" not in network:
        yield "it is not EFA's plugin", "NCCL_NET_PLUGIN=ofi, or its folder first"
    if net.lower() not in ("", *BUILT_IN, network, *(["aws libfabric"] if network == "libfabric" else [])):
        yield "NCCL_NET names another network, so the job ends", "unset NCCL_NET"
    if efa and provider and provider[0] != "^" and "efa" not in provider:
        yield "this provider is asked for in place of EFA", "unset FI_PROVIDER"
    if cards and nodes is None:
        yield "no RDMA device of the cards is visible", "on the host: modprobe efa"
    if nodes == []:
        what = "none of their device nodes in /dev/infiniband can be opened here"
        yield what, "docker run --device /dev/infiniband; vpc.amazonaws.com/efa in a pod"


def check(params: Mapping[str, Any]) -> Finding:
    """Which plugin NCCL would open in this environment, and whether an EFA card and its device node are visible."""
    root, release = Path(str(params["root"])), nccl_release()
    (net, _), (asked, _) = nccl_setting("NCCL_NET"), nccl_setting("NCCL_NET_PLUGIN")
    provider = os.environ.get("FI_PROVIDER", "")
    named = (("NCCL_NET", net), ("NCCL_NET_PLUGIN", asked), ("FI_PROVIDER", provider))
    evidence = [f"{name}={value}" for name, value in named if value or name in os.environ]
    try:
        cards, devices = efa_cards(root)
        lying = [str(path) for place in PLACES for path in sorted(root.glob(f"{place}/libnccl-net*.so"))][:4]
        google = "Google" in file_text(root / "sys/class/dmi/id/product_name")
    except (OSError, ValueError) as error:
        return unknown(f"{root} cannot be read: {type(error).__name__}")
    efa = bool(cards or devices)
    evidence += [f"{len(cards)} EFA cards on the PCI bus, {len(devices)} RDMA devices of them"] if efa else []
    evidence += ["a machine of Google Compute Engine"] if google else []
    if efa and is_switched_off(net, asked, release):
        return exposed(*evidence, "the plugin for EFA is switched off", advice="unset this, here and in nccl.conf")
    if not is_taken(asked, release):
        return exposed(
            *evidence, "this NCCL takes no path there", advice="NCCL_NET_PLUGIN=ofi, and the folder on the path"
        )
    opened = ask_linker(asked)
    if opened is None:
        return unknown(*evidence, "the dynamic linker did not answer in time: which plugin it finds is not known")
    if not opened.file:
        evidence += opened.said[:2] + [f"on the disk: {path}" for path in lying]
        if (asked or "none").lower() != "none" or net.lower() not in ("", *BUILT_IN):
            return exposed(*evidence, "a plugin is asked for, and none can be opened", advice=ON_PATH)
        if efa or (google and lying):
            return exposed(*evidence, "no plugin can be opened: NCCL goes on without one, silently", advice=ON_PATH)
        return unknown(*evidence, "no plugin, and no EFA card is visible here: other networks need none, or another")
    evidence.append(f"{opened.file} is opened: {opened.network or 'no network plugin in it'} {opened.apis}")
    nodes = [root / "dev/infiniband" / node for node in devices.values() if node]
    usable = [node for node in nodes if os.access(node, os.R_OK | os.W_OK)]
    against = next(contradictions(opened, (net, provider), release, cards, usable if devices else None), None)
    if against:
        return exposed(*evidence, against[0], advice=against[1])
    evidence += [f"{len(usable)} of {len(devices)} EFA devices can be opened here"] if devices else []
    evidence += [] if release else ["no NCCL of a package: whether it looks for these interfaces is not known"]
    return unknown(
        *evidence,
        "in order as far as can be seen here; other nodes, the version of libfabric and the security group are not",
        advice="run once with NCCL_DEBUG=INFO and look for `Using network`",
    )


# --- the experiments -----------------------------------------------------------------------------------------------

WITHOUT = symptom(r"the job goes on without the cloud's plugin; NET/Plugin")
NO_NETWORK = raised(r"network \S+ not found|Failed to initialize any NET plugin")
LINKER = "NCCL and a cloud's plugin: Python that opens plugins by NCCL's rules, small libraries; the linker is real"
STUB = "the cloud's plugin, by a library that has its symbols and no code; NCCL and the dynamic linker are real"
GCC = ("gcc",)


def pair(name: str, because: str, fix: str, wrong: Mapping[str, Any], nccl: bool = False, **right: Any) -> Experiment:
    """`wrong` is what the control arm does, `right` what the treatment arm does in its place."""
    stands_for = STUB if nccl else LINKER
    return Experiment(
        name=name,
        control=Arm(partial(start, nccl=nccl, **wrong), WITHOUT, because, "stand-in", stands_for),
        treatment=Arm(partial(start, nccl=nccl, **right), completed(), fix, "stand-in", stands_for),
        world_size=1,
        needs=Needs(packages={"nvidia-nccl-cu12": ">=2.14,<2.22"} if nccl else {}, programs=GCC, memory_mib=512),
        deadline_s=60,
        expected_s=(0.5, 0.5),
    )


NOT_FOUND = "the plugin's folder is not among those that the dynamic linker searches"
FOUND = "its folder, and that of libfabric, are in LD_LIBRARY_PATH"
EFA = {"provider": "efa"}
SHADOWED = "another vendor's libnccl-net.so comes first"

probe = Probe(
    params={"root": Param("path", "where sys, dev, opt and usr are; the linker that is asked is this machine's", "/")},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                reduce_over,
                NO_NETWORK,
                "NCCL_NET names the network of a plugin that is not there",
                "hardware",
                env={"NCCL_NET": "absent-network"},
            ),
            treatment=Arm(
                reduce_over, completed(), "NCCL_NET names one that it has", "hardware", env={"NCCL_NET": "Socket"}
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1),
            deadline_s=90,
            expected_s=(10, 10),
        ),
        pair("libnccl", NOT_FOUND, FOUND, {"path": ""}, nccl=True),
        pair("linker", NOT_FOUND, FOUND, {"path": ""}),
    ),
    variants=(
        pair("dependency", "the folder of libfabric is not searched", FOUND, {"path": "ofi"}),
        pair("shadowed", SHADOWED, "NCCL_NET_PLUGIN=ofi", {"path": "hpcx:ofi:efa"}, path="hpcx:ofi:efa", asked="ofi"),
        pair("order", SHADOWED, "the cloud's folder comes first", {"path": "hpcx:ofi:efa"}, path="ofi:efa:hpcx"),
        pair("old-plugin", "the plugin has an interface that is too old, v3", "v5", {"api": 3}, nccl=True),
        pair("late", "os.environ sets LD_LIBRARY_PATH in the running process", FOUND, {"late": True}),
        pair("name", "NCCL_NET_PLUGIN=aws, and there is no such file", "ofi", {"asked": "aws"}, asked="ofi"),
        pair("provider", f"{NOT_FOUND}; FI_PROVIDER=efa", FOUND, {"path": "", **EFA}, nccl=True, **EFA),
    ),
)
