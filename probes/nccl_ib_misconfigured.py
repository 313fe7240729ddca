"""NCCL uses an empty GID on RoCE; the check reads the ports and GIDs that NCCL's variables select on this node."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Dict, List, Mapping, Tuple

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
    Unavailable,
    completed,
    exposed,
    raised,
    unknown,
)

DEVICES = Path("/sys/class/infiniband")


def reduce_over_card(ctx: Context) -> None:
    """Runs an all-reduce. The arms differ only in NCCL_IB_GID_INDEX, which NCCL reads from the environment."""
    if not any(port.active and port.layer == "Ethernet" for port in read_ports(DEVICES)):
        raise Unavailable("this machine has no active RoCE port, and on InfiniBand the GID index has no effect")
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=45)
    total = torch.full((1 << 20,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 3).all().item()


@dataclass
class Port:
    """A port of an RDMA device as sysfs shows it; `gids` maps an index to (GID, type, network interface)."""

    device: str
    number: str
    state: str
    layer: str
    gids: Dict[int, Tuple[str, str, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.device}:{self.number}"

    @property
    def active(self) -> bool:
        return self.state.endswith("ACTIVE")


def read_ports(root: Path) -> List[Port]:
    result = []
    for path in sorted(root.glob("*/ports/*")):
        port = Port(path.parent.parent.name, path.name, file_text(path / "state"), file_text(path / "link_layer"))
        for gid in path.glob("gids/*"):
            value = file_text(gid)
            if value.strip("0:") and gid.name.isdecimal() and is_address(value):
                attributes = path / "gid_attrs"
                kind, interface = (file_text(attributes / folder / gid.name) for folder in ("types", "ndevs"))
                port.gids[int(gid.name)] = (value, kind, interface)
        result.append(port)
    return result


def is_selected(port: Port, rule: str) -> bool:
    """Does NCCL_IB_HCA select this port? It lists prefixes; ^ excludes them, = means whole names, :1 one port."""
    excludes = rule.startswith("^")
    exact = rule[excludes:].startswith("=")
    for word in filter(None, rule[excludes + exact :].split(",")):
        device, _, number = word.partition(":")
        number = number.split(":")[0]
        if (port.device == device if exact else port.device.startswith(device)) and number in ("", port.number):
            return not excludes
    return excludes


def check(params: Mapping[str, object]) -> Finding:
    """Can NCCL use the ports and GIDs that its variables select here?"""
    root = Path(str(params["sysfs"]))
    set_by_user = {
        name: value for name in ("DISABLE", "HCA", "GID_INDEX") if (value := nccl_setting(f"NCCL_IB_{name}")[0])
    }
    rule = set_by_user.get("HCA", "")
    evidence = [f"NCCL_IB_{name}={value}" for name, value in set_by_user.items()]
    if not (root.parent if root == DEVICES else root).is_dir():
        return unknown(*evidence, f"kb cannot read {root}")
    ports = read_ports(root)
    if not ports and rule and not rule.startswith("^"):
        message = f"there is no RDMA device in {root}, so NCCL uses TCP"
        advice = "remove NCCL_IB_HCA, or give the job its devices (in a container: pass /dev/infiniband in)"
        return exposed(*evidence, message, advice=advice)
    if not ports:
        return unknown(
            f"there is no RDMA device in {root}, so NCCL uses TCP",
            "kb cannot tell whether this node should have one",
            advice="run this on the job's node, in its container",
        )
    evidence += [f"{port.name} {port.layer} {port.state}" for port in ports[:16]]
    return judge_ports(ports, set_by_user, evidence, is_here=root == DEVICES)


def judge_ports(ports: List[Port], set_by_user: Mapping[str, str], evidence: List[str], *, is_here: bool) -> Finding:
    """Can NCCL open the ports that NCCL_IB_HCA selects, and are they active?"""
    other = [f"{name}={value}" for name in ("NCCL_NET", "NCCL_NET_PLUGIN") if (value := nccl_setting(name)[0])]
    if other and other != ["NCCL_NET=IB"] and "NCCL_NET_PLUGIN=none" not in other:
        return unknown(
            *evidence, *other, "the job uses another network plugin, which may select ports by its own rules"
        )
    if set_by_user.get("DISABLE", "0") != "0":
        return unknown(*evidence, "NCCL_IB_DISABLE makes NCCL use TCP instead of these devices, many times slower")
    if is_here and not list(Path("/dev/infiniband").glob("uverbs*")):
        message = "/dev/infiniband is empty here, so NCCL cannot open the devices"
        return exposed(*evidence, message, advice="docker run --device /dev/infiniband")
    fabric = [port for port in ports if port.layer in ("InfiniBand", "Ethernet")]
    if not fabric:
        return unknown(*evidence, "no port is InfiniBand or RoCE, so NCCL needs another network plugin")
    rule = set_by_user.get("HCA", "")
    selected = [port for port in fabric if not rule or is_selected(port, rule)]
    if not selected:
        return exposed(*evidence, "NCCL_IB_HCA matches none of these devices, so NCCL uses TCP", advice="ibstat -l")
    used = [port for port in selected if port.active]
    named_devices = set(re.split(r"[=:,]", rule)) if not rule.startswith("^") else set()
    alive = {port.device for port in used}  # one port of two may have no cable
    dead = [port.name for port in selected if port.device in named_devices - alive]
    if dead:
        message = (
            f"NCCL_IB_HCA names {', '.join(dead)}, not active here; NCCL skips inactive ports, other nodes may not"
        )
        advice = "run ibstat; check the cable, the switch port and the subnet manager (State: Initializing)"
        return exposed(*evidence, message, advice=advice)
    if not used:
        return unknown(*evidence, "no port is active, so NCCL uses TCP", advice="run ibstat if they should be in use")
    return judge_gids(used, set_by_user.get("GID_INDEX", ""), evidence)


def judge_gids(used: List[Port], index: str, evidence: List[str]) -> Finding:
    """Do the Ethernet ports have the GID that NCCL will use?"""
    doubts = []
    if len({port.layer for port in used}) > 1:
        doubts.append("NCCL uses InfiniBand and Ethernet ports together: name those of one fabric in NCCL_IB_HCA")
    for port in used:
        if port.layer == "Ethernet":
            problem, is_certain = gid_problem(port, index)
            if is_certain:
                return exposed(*evidence, problem, advice=ADVICE)
            doubts += [problem] if problem else []
    if doubts:
        return unknown(*evidence, *doubts, advice=ADVICE)
    if not index and any(port.layer == "Ethernet" for port in used) and (release := nccl_release()) < FINDS_GID:
        nccl = f"NCCL {release[0]}.{release[1]}" if release else "an NCCL before 2.21 (kb found no package of NCCL)"
        return unknown(*evidence, f"{nccl} uses GID 0 if NCCL_IB_GID_INDEX is not set", advice=ADVICE)
    return unknown(
        *evidence,
        "kb found no fault on this node; compare the other nodes",
        "only ib_write_bw between two nodes shows whether the switches are set up (routing, MTU, PFC)",
    )


FINDS_GID = (2, 21)
ADVICE = (
    "run show_gids on every node; with NCCL 2.21 or newer remove NCCL_IB_GID_INDEX, with an older NCCL set it to the "
    "RoCE v2 GID with an IPv4 address"
)


def gid_problem(port: Port, index: str) -> Tuple[str, bool]:
    """Returns what is wrong with the GID that NCCL will use, and whether that is certain."""
    if not port.gids:
        return f"{port.name}: the GID table is empty, or kb cannot read it", False
    if not re.fullmatch("[0-9]{1,4}", index):
        if any(kind == "RoCE v2" and is_ipv4(gid) for gid, kind, _ in port.gids.values()):
            return "", False
        return f"{port.name} has no RoCE v2 GID with an IPv4 address, which NCCL 2.21 and newer look for", False
    if int(index) not in port.gids:
        known = ", ".join(" ".join((f"{at}:", *gid)) for at, gid in sorted(port.gids.items())[:6])
        return f"{port.name}: GID {index} is empty; its GIDs are {known}", True
    gid, kind, interface = port.gids[int(index)]
    if ipaddress.ip_address(gid).is_link_local:
        return (
            f"{port.name}: GID {index} is {gid} ({kind}, {interface}), a link-local address, which no router forwards",
            False,
        )
    if kind != "RoCE v2":
        return f"{port.name}: GID {index} is {gid} ({kind}, {interface}), not RoCE v2", False
    return "", False


def is_address(gid: str) -> bool:
    try:
        return bool(ipaddress.IPv6Address(gid))
    except ValueError:
        return False


def is_ipv4(gid: str) -> bool:
    return ipaddress.IPv6Address(gid).ipv4_mapped is not None


OVER_THE_CARD = {"NCCL_NET": "IB", "NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1"}  # in both arms

probe = Probe(
    params={
        "sysfs": Param(
            "path",
            "a copy of another node's: `cd /sys/class/infiniband && cp -r --parents */ports DIR`",
            str(DEVICES),
        )
    },
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                reduce_over_card,
                expect=raised(r"ibv_(modify_qp|query_gid) failed|Got completion .*(error |status=)12"),
                because="NCCL_IB_GID_INDEX=254 selects an empty entry of the GID table",
                fidelity="hardware",
                env={**OVER_THE_CARD, "NCCL_IB_GID_INDEX": "254"},
            ),
            treatment=Arm(
                reduce_over_card,
                expect=completed(),
                because="NCCL_IB_GID_INDEX is not set, so NCCL 2.21 and newer finds the GID itself",
                fidelity="hardware",
                env=OVER_THE_CARD,
            ),
            backend="nccl",
            needs=Needs(gpus=2),
            deadline_s=120,
            settle_s=10,
            expected_s=(20, 20),
        ),
    ),
)
