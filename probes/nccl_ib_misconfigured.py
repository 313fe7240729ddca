"""RoCE with a GID that leads nowhere; the check reads the ports and GIDs that NCCL's variables choose on this node."""

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
    """Both arms are this job. They differ in NCCL_IB_GID_INDEX alone, which NCCL reads from the environment."""
    if not any(port.active and port.layer == "Ethernet" for port in read_ports(DEVICES)):
        raise Unavailable("no active RoCE port on this machine; on InfiniBand the GID index decides nothing")
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=45)
    total = torch.full((1 << 20,), ctx.rank + 1.0, device=ctx.device)
    dist.all_reduce(total)
    assert (total == 3).all().item()


@dataclass
class Port:
    """One port of an RDMA device as sysfs shows it; `gids` are index to (GID, type, network interface)."""

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
                kind, of = file_text(attributes / "types" / gid.name), file_text(attributes / "ndevs" / gid.name)
                port.gids[int(gid.name)] = (value, kind, of)
        result.append(port)
    return result


def named(port: Port, rule: str) -> bool:
    """Does NCCL_IB_HCA choose it? Prefixes, ^ to exclude, = for whole names, :1 for one port."""
    but = rule.startswith("^")
    exact = rule[but:].startswith("=")
    for word in filter(None, rule[but + exact :].split(",")):
        device, _, number = word.partition(":")
        number = number.split(":")[0]
        if (port.device == device if exact else port.device.startswith(device)) and number in ("", port.number):
            return not but
    return but


def check(params: Mapping[str, object]) -> Finding:
    """Ports, their link layers, and the GID behind NCCL_IB_GID_INDEX, for the devices that NCCL would use here."""
    root = Path(str(params["sysfs"]))
    set_by_user = {
        name: value for name in ("DISABLE", "HCA", "GID_INDEX") if (value := nccl_setting(f"NCCL_IB_{name}")[0])
    }
    rule, index = set_by_user.get("HCA", ""), set_by_user.get("GID_INDEX", "")
    evidence = [f"NCCL_IB_{name}={value}" for name, value in set_by_user.items()]
    if not (root.parent if root == DEVICES else root).is_dir():
        return unknown(*evidence, f"{root} cannot be read here")
    ports = read_ports(root)
    if not ports and rule and not rule.startswith("^"):
        why = f"no RDMA device in {root}, so NCCL goes over TCP; in a container: is /dev/infiniband passed in?"
        return exposed(*evidence, why, advice="remove the variable, or give the job its devices")
    if not ports:
        return unknown(
            f"no RDMA device in {root}: NCCL goes over TCP here",
            "whether this node should have one cannot be seen; ask in the job's own container and node",
        )
    evidence += [f"{port.name} {port.layer} {port.state}" for port in ports[:16]]
    other = [f"{name}={value}" for name in ("NCCL_NET", "NCCL_NET_PLUGIN") if (value := nccl_setting(name)[0])]
    if other and other != ["NCCL_NET=IB"] and "NCCL_NET_PLUGIN=none" not in other:
        return unknown(*evidence, *other, "another network plugin, which may choose by rules of its own")
    if set_by_user.get("DISABLE", "0") != "0":
        return unknown(*evidence, "NCCL does not use these devices at all: TCP, many times slower")
    if root == DEVICES and not list(Path("/dev/infiniband").glob("uverbs*")):
        return exposed(
            *evidence,
            "/dev/infiniband is empty here: NCCL cannot open them",
            advice="docker run --device /dev/infiniband",
        )
    fabric = [port for port in ports if port.layer in ("InfiniBand", "Ethernet")]
    if not fabric:
        return unknown(*evidence, "no InfiniBand or RoCE among them: NCCL needs another network plugin for these")
    chosen = [port for port in fabric if not rule or named(port, rule)]
    if not chosen:
        return exposed(*evidence, "NCCL_IB_HCA matches none of them, so NCCL goes over TCP", advice="ibstat -l")
    used = [port for port in chosen if port.active]
    named_devices = set(re.split(r"[=:,]", rule)) if not rule.startswith("^") else set()
    alive = {port.device for port in used}  # one port of two may have no cable
    dead = [port.name for port in chosen if port.device in named_devices - alive]
    if dead:
        what = f"named in NCCL_IB_HCA and not active: {', '.join(dead)}; NCCL leaves them out here, other nodes may not"
        return exposed(*evidence, what, advice="ibstat: cable, switch port, subnet manager (State: Initializing)")
    if not used:
        return unknown(*evidence, "no port is active, so NCCL goes over TCP", advice="ibstat, if they should be in use")
    doubts = []
    if len({port.layer for port in used}) > 1:
        doubts.append("InfiniBand and Ethernet ports are used together: name those of one fabric in NCCL_IB_HCA")
    for port in used:
        if port.layer == "Ethernet":
            problem, is_certain = gid_problem(port, index)
            if is_certain:
                return exposed(*evidence, problem, advice=ADVICE)
            doubts += [problem] if problem else []
    if doubts:
        return unknown(*evidence, *doubts, advice=ADVICE)
    if not index and any(port.layer == "Ethernet" for port in used) and (release := nccl_release()) < FINDS_GID:
        what = f"NCCL {release[0]}.{release[1]}" if release else "an NCCL before 2.21 (none is installed as a package)"
        return unknown(*evidence, f"{what} takes GID 0 when NCCL_IB_GID_INDEX is not set", advice=ADVICE)
    return unknown(
        *evidence,
        "in order on this node; compare the others. Whether the switches carry it (routing, MTU, PFC) only "
        "ib_write_bw between two nodes shows",
    )


FINDS_GID = (2, 21)


ADVICE = "show_gids on every node; with NCCL 2.21 or newer remove NCCL_IB_GID_INDEX, else give the RoCE v2 GID of IPv4"


def gid_problem(port: Port, index: str) -> Tuple[str, bool]:
    """What is wrong with the GID that is used, and whether that is certain."""
    if not port.gids:
        return f"{port.name}: its GID table cannot be read here, or is empty", False
    if not re.fullmatch("[0-9]{1,4}", index):
        if any(kind == "RoCE v2" and is_ipv4(gid) for gid, kind, _ in port.gids.values()):
            return "", False
        return f"{port.name}: no RoCE v2 GID with an IPv4 address, which NCCL 2.21 and newer look for", False
    if int(index) not in port.gids:
        there = ", ".join(f"{at}: {gid} {kind} {of}" for at, (gid, kind, of) in sorted(port.gids.items())[:6])
        return f"{port.name}: GID {index} is empty; there are {there}", True
    gid, kind, of = port.gids[int(index)]
    if ipaddress.ip_address(gid).is_link_local:
        return (
            f"{port.name}: GID {index} is {gid} ({kind}, {of}), a link-local address, which no router forwards",
            False,
        )
    if kind != "RoCE v2":
        return f"{port.name}: GID {index} is {gid} ({kind}, {of}), not RoCE v2", False
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
            "path", "another node's: `cd /sys/class/infiniband && cp -r --parents */ports DIR`", str(DEVICES)
        )
    },
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                reduce_over_card,
                expect=raised(r"ibv_(modify_qp|query_gid) failed|Got completion .*(error |status=)12"),
                because="NCCL_IB_GID_INDEX=254, an entry of the GID table that is empty",
                fidelity="hardware",
                env={**OVER_THE_CARD, "NCCL_IB_GID_INDEX": "254"},
            ),
            treatment=Arm(
                reduce_over_card,
                expect=completed(),
                because="the variable is not set, NCCL (2.21 and newer) finds the GID",
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
