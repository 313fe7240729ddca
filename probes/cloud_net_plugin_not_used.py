"""A cloud's network plugin for NCCL is on the disk, but NCCL does not load it, and the job communicates over TCP.

Small libraries stand for the plugin and its libfabric. The dynamic linker is real, and so is NCCL up to 2.21, which
opens its plugin before it looks for a GPU. Without NCCL, Python opens the plugin as NCCL's plugin_open.cc does.
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

PLUGIN = "struct { const char *name; void *calls[24]; } ncclNetPlugin_v%d = {%s};"  # the symbol that NCCL looks for
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
LOADED = r"NET/Plugin: (Loaded net plugin KbFabric |it has KbFabric v[5-8]$)"  # NCCL 2.21 looks for v5 to v8


def file_names(asked: str) -> List[str]:
    """The files that NCCL 2.21 and newer releases try, in this order, for a value of NCCL_NET_PLUGIN."""
    if asked.lower() == "none":
        return []
    words = [word for word in asked.split(",") if word]
    return [name for word in words for name in (word, f"libnccl-net-{word}.so")] or ["libnccl-net.so"]


# --- the job -------------------------------------------------------------------------------------------------------


def build(source: str, library: Path, *options: str) -> None:
    library.parent.mkdir(exist_ok=True)
    code = library.with_suffix(".c")
    code.write_text(source)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(code), *options], check=True, timeout=20)


def build_plugins(ctx: Context, api: int) -> None:
    """The cloud's plugin with this version of the interface, its libfabric, and another vendor's plugin."""
    build("int fi_getinfo(void) { return 0; }", ctx.dir / "efa/libfabric.so.1", "-Wl,-soname,libfabric.so.1")
    for version, network, folder in ((api, '"KbFabric"', "ofi"), (6, '"IBext"', "hpcx")):
        needs = [str(ctx.dir / "efa/libfabric.so.1")] if folder == "ofi" else []
        build(PLUGIN % (version, network), ctx.dir / folder / "libnccl-net.so", "-Wl,--no-as-needed", *needs)
    (ctx.dir / "ofi/libnccl-net-ofi.so").symlink_to("libnccl-net.so")


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
    """A process opens a plugin as NCCL does. The plugins of the cloud and of another vendor are on the disk."""
    build_plugins(ctx, api)
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
    lines = [line for line in re.findall(r"NET/Plugin ?: .*", ran.stdout) if "CollNet" not in line]
    ctx.note(network_plugin=lines)
    if not any(re.match(LOADED, line) for line in lines):
        raise Symptom("the job goes on without the cloud's plugin; %s" % " ".join(lines)[:300])


def reduce_over_network(ctx: Context) -> None:
    """An all-reduce over the network that NCCL_NET names; the arms differ only in that variable."""
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=60)
    total = torch.ones(1 << 10, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 1).all().item()


# --- the check -----------------------------------------------------------------------------------------------------

API_OF = {  # the oldest and newest plugin interface that a release looks for; 2.31 and later accept any newer one
    (2, 14): (4, 6), (2, 19): (5, 7), (2, 20): (5, 8), (2, 24): (5, 9), (2, 26): (6, 10), (2, 28): (6, 11),
    (2, 30): (6, 12), (2, 31): (6, 20),
}  # fmt: skip
PLACES = (  # where the installers of the clouds put their plugins
    "opt/amazon/*ofi-nccl/lib*", "opt/amazon/*ofi-nccl/lib/*", "opt/aws-ofi-nccl/lib*", "opt/aws-ofi-nccl/install/lib",
    "usr/local/gib/lib64", "usr/local/tcpx*/lib64", "usr/local/nvidia/lib64", "var/lib/tcpx*/lib64",
)  # fmt: skip
ON_PATH = "put the plugin's folder, and on AWS that of libfabric, into LD_LIBRARY_PATH before the job starts"
BUILT_IN = ("ib", "socket")


class Opened(NamedTuple):
    """What the dynamic linker opens for the names that NCCL would try."""

    file: str
    network: str
    apis: List[int]
    lines: List[str]


def ask_linker(asked: str) -> Optional[Opened]:
    """Asks in a separate process, because a library runs code when it is opened. None if that process fails."""
    try:
        ran = subprocess.run(
            [sys.executable, "-S", "-c", ASK_LINKER, *file_names(asked)], capture_output=True, timeout=0.7, check=True
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    lines = re.findall(r"NET/Plugin: (.*)", ran.stdout.decode(errors="replace"))
    loaded = [match.groups() for line in lines if (match := re.fullmatch(r"it has (.*) v(\d+)", line))]
    files = [line[7:] for line in lines if line.startswith("opened ")]
    network = loaded[0][0] if loaded else ""
    return Opened(files[0] if files else "", network, [int(number) for _, number in loaded], lines)


def efa_cards(root: Path) -> Tuple[List[str], Dict[str, str]]:
    """PCI addresses of EFA cards, and the RDMA devices that drive them, each with its device node."""
    pci = [path.parent.name for path in root.glob("sys/bus/pci/devices/*/vendor") if is_efa(path.parent)]
    nodes = {file_text(path): path.parent.name for path in root.glob("sys/class/infiniband_verbs/*/ibdev")}
    devices = [path.parent for path in root.glob("sys/class/infiniband/*/device") if is_efa(path)]
    return sorted(pci), {path.name: nodes.get(path.name, "") for path in sorted(devices)}


def is_efa(device: Path) -> bool:
    return file_text(device / "vendor") == "0x1d0f" and file_text(device / "device").startswith("0xefa")


def is_switched_off(net: str, asked: str, release: Tuple[int, ...]) -> bool:
    empty = os.environ.get("NCCL_NET_PLUGIN") == "" and release >= (2, 27)  # then NCCL's list of plugins is empty
    return empty or asked.lower() == "none" or net.lower() in BUILT_IN


def accepts_value(asked: str, release: Tuple[int, ...]) -> bool:
    """Is NCCL_NET_PLUGIN not a path, or does this NCCL accept a path?"""
    return "/" not in asked or not release or (release >= (2, 21) and not (2, 27, 3) <= release < (2, 27, 5))


def contradictions(
    opened: Opened, asked_for: Tuple[str, str], release: Tuple[int, ...], cards: List[str], nodes: Optional[List[Path]]
) -> Iterator[Tuple[str, str]]:
    """Reasons why NCCL will not use the plugin that it opens, each with what to do.

    `asked_for` holds NCCL_NET and FI_PROVIDER. `nodes` holds the device nodes of EFA's RDMA devices that this process
    can open, and is None if there are no devices.
    """
    net, provider = asked_for
    network, efa = opened.network.lower(), bool(cards) or nodes is not None
    apis = next((apis for since, apis in reversed(list(API_OF.items())) if since <= release), None)
    if apis and not any(apis[0] <= number <= apis[1] for number in opened.apis):
        too_old_or_new = (
            f"NCCL {'.'.join(map(str, release))} looks for interface v{apis[0]} to v{apis[1]} in the plugin"
        )
        yield too_old_or_new, "install a plugin that was released at about the same time as this NCCL"
    if efa and "libfabric" not in network:
        other_plugin = "set NCCL_NET_PLUGIN=ofi, or put the folder of EFA's plugin first into LD_LIBRARY_PATH"
        yield "the plugin is not EFA's", other_plugin
    if net.lower() not in ("", *BUILT_IN, network, *(["aws libfabric"] if network == "libfabric" else [])):
        yield "NCCL_NET names another network than the plugin's, so the job will end", "unset NCCL_NET"
    if efa and provider and provider[0] != "^" and "efa" not in provider:
        yield "FI_PROVIDER selects another provider than EFA", "unset FI_PROVIDER"
    if cards and nodes is None:
        yield "no RDMA device of the EFA cards is visible", "on the host: modprobe efa"
    if nodes == []:
        no_node = "this process cannot open any of their device nodes in /dev/infiniband"
        yield no_node, "docker run --device /dev/infiniband; in a pod, request vpc.amazonaws.com/efa"


def check(params: Mapping[str, Any]) -> Finding:
    """Which plugin would NCCL open in this environment, and are an EFA card and its device node visible?"""
    root, release = Path(str(params["root"])), nccl_release()
    (net, _), (asked, _) = nccl_setting("NCCL_NET"), nccl_setting("NCCL_NET_PLUGIN")
    provider = os.environ.get("FI_PROVIDER", "")
    named = (("NCCL_NET", net), ("NCCL_NET_PLUGIN", asked), ("FI_PROVIDER", provider))
    evidence = [f"{name}={value}" for name, value in named if value or name in os.environ]
    try:
        cards, devices = efa_cards(root)
        on_disk = [str(path) for place in PLACES for path in sorted(root.glob(f"{place}/libnccl-net*.so"))][:4]
        google = "Google" in file_text(root / "sys/class/dmi/id/product_name")
    except (OSError, ValueError) as error:
        return unknown(f"kb cannot read {root}: {type(error).__name__}")
    efa = bool(cards or devices)
    evidence += [f"{len(cards)} EFA cards on the PCI bus, with {len(devices)} RDMA devices"] if efa else []
    evidence += ["this machine is on Google Compute Engine"] if google else []
    if efa and is_switched_off(net, asked, release):
        switch = "unset the variable that switches it off, in the environment and in nccl.conf"
        return exposed(*evidence, "the plugin for EFA is switched off", advice=switch)
    if not accepts_value(asked, release):
        by_name = "set NCCL_NET_PLUGIN=ofi, and put the plugin's folder into LD_LIBRARY_PATH"
        return exposed(*evidence, "this NCCL does not accept a path in NCCL_NET_PLUGIN", advice=by_name)
    opened = ask_linker(asked)
    if opened is None:
        return unknown(*evidence, "the dynamic linker did not answer in time, so kb cannot tell which plugin it finds")
    if not opened.file:
        evidence += opened.lines[:2] + [f"on the disk: {path}" for path in on_disk]
        if (asked or "none").lower() != "none" or net.lower() not in ("", *BUILT_IN):
            return exposed(*evidence, "the environment asks for a plugin, but none can be opened", advice=ON_PATH)
        if efa or (google and on_disk):
            return exposed(*evidence, "NCCL can open no plugin and silently goes on without one", advice=ON_PATH)
        return unknown(
            *evidence, "kb sees no plugin and no EFA card here; other networks need no plugin, or another one"
        )
    evidence.append(f"NCCL would open {opened.file}: {opened.network or 'no network plugin in it'} {opened.apis}")
    nodes = [root / "dev/infiniband" / node for node in devices.values() if node]
    usable = [node for node in nodes if os.access(node, os.R_OK | os.W_OK)]
    against = next(contradictions(opened, (net, provider), release, cards, usable if devices else None), None)
    if against:
        return exposed(*evidence, against[0], advice=against[1])
    evidence += [f"this process can open {len(usable)} of {len(devices)} EFA devices"] if devices else []
    evidence += [] if release else ["kb found no NCCL package, so it cannot tell which interfaces NCCL looks for"]
    return unknown(
        *evidence,
        "kb found nothing wrong, but cannot see other nodes, the version of libfabric and the security group",
        advice="run once with NCCL_DEBUG=INFO and look for `Using network`",
    )


# --- the experiments -----------------------------------------------------------------------------------------------

WITHOUT = symptom(r"the job goes on without the cloud's plugin; NET/Plugin")
NO_NETWORK = raised(r"network \S+ not found|Failed to initialize any NET plugin")
LINKER = "NCCL and a cloud's plugin; here Python opens small libraries by NCCL's rules, through the real dynamic linker"
STUB = "a cloud's plugin; here NCCL opens a library with the plugin's symbols and no code"
GCC = ("gcc",)


def pair(name: str, because: str, fix: str, wrong: Mapping[str, Any], nccl: bool = False, **right: Any) -> Experiment:
    """`wrong` holds the keywords of the control arm, `right` those of the treatment arm."""
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


NOT_FOUND = "the dynamic linker does not search the plugin's folder"
FOUND = "the folders of the plugin and of libfabric are in LD_LIBRARY_PATH before the process starts"
EFA = {"provider": "efa"}
SHADOWED = "the folder of another vendor's libnccl-net.so comes first in LD_LIBRARY_PATH"

probe = Probe(
    params={
        "root": Param("path", "folder that contains sys, dev, opt and usr; the linker is always this machine's", "/")
    },
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                reduce_over_network,
                NO_NETWORK,
                "NCCL_NET names the network of a plugin that is not installed",
                "hardware",
                env={"NCCL_NET": "absent-network"},
            ),
            treatment=Arm(
                reduce_over_network,
                completed(),
                "NCCL_NET names a network that NCCL has built in",
                "hardware",
                env={"NCCL_NET": "Socket"},
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
        pair("dependency", "the dynamic linker does not search the folder of libfabric", FOUND, {"path": "ofi"}),
        pair(
            "shadowed",
            SHADOWED,
            "NCCL_NET_PLUGIN=ofi makes NCCL open libnccl-net-ofi.so, which only the cloud's folder has",
            {"path": "hpcx:ofi:efa"},
            path="hpcx:ofi:efa",
            asked="ofi",
        ),
        pair(
            "order",
            SHADOWED,
            "the cloud's folder comes first in LD_LIBRARY_PATH",
            {"path": "hpcx:ofi:efa"},
            path="ofi:efa:hpcx",
        ),
        pair(
            "old-plugin",
            "the plugin has interface v3 only, which is too old for this NCCL",
            "the plugin has interface v5, which this NCCL looks for",
            {"api": 3},
            nccl=True,
        ),
        pair("late", "os.environ sets LD_LIBRARY_PATH after the process has started, too late", FOUND, {"late": True}),
        pair(
            "name",
            "NCCL_NET_PLUGIN=aws, but no file aws or libnccl-net-aws.so exists",
            "NCCL_NET_PLUGIN=ofi, and libnccl-net-ofi.so exists",
            {"asked": "aws"},
            asked="ofi",
        ),
        pair(
            "provider",
            f"{NOT_FOUND}, and FI_PROVIDER=efa does not help",
            FOUND,
            {"path": "", **EFA},
            nccl=True,
            **EFA,
        ),
    ),
)
