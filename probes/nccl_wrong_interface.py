"""Two nodes with a bridge of containers and a cable: NCCL offers the bridge's address, which leads nowhere."""

from __future__ import annotations

import ctypes
import fcntl
import os
import re
import socket
import struct
import time
from functools import partial
from pathlib import Path
from typing import Any, Dict, List, Mapping, NoReturn, Tuple

from kb.namespaces import bind_over, bring_up, join_nodes, lay_cable, own_network, run_two_nodes
from kb.nccl import nccl_libraries, nccl_release, nccl_setting
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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import spans_nodes

BRIDGE, NIC = "br-kb0", "kb0"  # what a container runtime makes on every node, and the cable between the nodes
IFF_UP, IFF_RUNNING = 0x1, 0x40  # switched on; and with a link
BRIDGES_ADDRESS = "172.31.83.1"  # the same on every node, as such bridges have it


def meet_over_nccl(ctx: Context, *, interface: str, bridge: bool = True) -> None:
    """Rank 0 makes NCCL's unique id, which holds its address; rank 1, on the other node, connects to it."""
    try:
        run_two_nodes(ctx, partial(connect_as_node, interface=interface, bridge=bridge))
    finally:
        if (ctx.dir / "id").exists():
            ctx.note(unique_id=(ctx.dir / "id").read_text())


def connect_as_node(node: Context, *, interface: str, bridge: bool) -> None:
    set_up_network(node, bridge)
    os.environ["NCCL_CONF_FILE"] = os.devnull
    if interface:
        os.environ["NCCL_SOCKET_IFNAME"] = interface
    node.reached()
    if node.rank == 0:
        listener, address, port, by = unique_id()
        (node.dir / "id.part").write_text(f"{address} {port} {by}")
        (node.dir / "id.part").rename(node.dir / "id")
        assert node.meet("connected")
        del listener
        return
    while not (node.dir / "id").exists():
        time.sleep(0.005)
    address, its_port = (node.dir / "id").read_text().split()[:2]
    try:
        socket.create_connection((address, int(its_port)), timeout=3).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = " (this node's own)" if address in dict(interfaces()).values() else ""
        raise Symptom(f"rank 1: connect to {address}{where}, the address in the id, failed: {reason}") from error
    node.meet("connected")


def unique_id() -> Tuple[Any, str, int, str]:
    """An object that keeps listening, the address and port that go into the id, and what chose them."""
    for nccl, version in nccl_libraries():
        buffer = (ctypes.c_char * 128)()
        if nccl.ncclGetUniqueId(buffer):
            no_interface(f"libnccl {version}")
        data = bytes(buffer)
        at = 8 if struct.unpack_from("=H", data, 8)[0] == socket.AF_INET else 0  # older releases have no magic number
        port, packed = struct.unpack_from("!H4s", data, at + 2)
        return nccl, socket.inet_ntoa(packed), port, f"libnccl {version}"
    chosen = choice(os.environ.get("NCCL_SOCKET_IFNAME", ""), interfaces())
    if not chosen:
        no_interface("NCCL's rules")
    listener = socket.create_server((chosen[0][1], 0))
    return listener, chosen[0][1], listener.getsockname()[1], "NCCL's rules, as no libnccl is installed"


def no_interface(by: str) -> NoReturn:
    here = " ".join(name for name, _ in interfaces())
    raise Symptom(f"NCCL_SOCKET_IFNAME={os.environ.get('NCCL_SOCKET_IFNAME')}: {by} found none, and there are: {here}")


# --- NCCL's rules --------------------------------------------------------------------------------------------------


def choice(named: str, present: List[Tuple[str, str]], version: Tuple[int, ...] = ()) -> List[Tuple[str, str]]:
    """Those of the present interfaces that NCCL uses, best first: the first is for its bootstrap."""
    rules = ["ib", "^docker,lo", "docker", "lo"]
    if version >= (2, 28):
        rules = ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]
    for rule in [named] if len(named) > 1 else rules:
        but = rule.startswith("^")
        exact = rule[but:].startswith("=")
        words = [word.split(":")[0] for word in rule[but + exact :].split(",") if word]
        result = [
            (name, address)
            for name, address in present
            if any(name == word if exact else name.startswith(word) for word in words) != but
        ]
        if result:
            return result
    return []


def interfaces(flag: int = IFF_UP) -> List[Tuple[str, str]]:
    """Name and IPv4 address of every interface that has one and this flag, in the kernel's order."""
    result = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(40, b"\0")
            try:
                address = socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24])  # SIOCGIFADDR
                flags = struct.unpack_from("=H", fcntl.ioctl(any_socket, 0x8913, request), 16)[0]  # SIOCGIFFLAGS
            except OSError:
                continue
            if flags & flag:
                result.append((name, address))
    return result


def with_ipv6_only(present: List[Tuple[str, str]]) -> List[Tuple[str, str]]:
    """And those that have an IPv6 address alone, link-local or not: NCCL takes these too, behind the others."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:  # IPv6 is switched off
        return present
    with_ipv4 = dict(interfaces())
    others = {row[5]: "with an IPv6 address only" for row in rows if row[5] not in with_ipv4 and row[5] != "lo"}
    return present + list(others.items())


def check(params: Mapping[str, Any]) -> Finding:
    """Which interface would NCCL take on this node? Its variable, its configuration files, then its rules."""
    named, where = nccl_setting("NCCL_SOCKET_IFNAME")
    family, _ = nccl_setting("NCCL_SOCKET_FAMILY")
    if family == "AF_INET6":
        return unknown("NCCL_SOCKET_FAMILY=AF_INET6, and this check looks at IPv4 addresses only")
    version = nccl_release()
    try:
        present, linked = interfaces(), interfaces(IFF_RUNNING)
    except OSError as error:
        return unknown(f"the interfaces cannot be listed: {error.strerror}")
    if version >= (2, 28):
        present = linked
    here = ", ".join(f"{name} {address}" for name, address in present)
    chosen = choice(named, present, version)
    with_others = choice(named, with_ipv6_only(present), version) if family != "AF_INET" else chosen
    if chosen[:1] != with_others[:1]:
        other = " ".join(with_others[0])
        return unknown(f"NCCL may use {other}, and this check knows the reach of IPv4 addresses only")
    if not version and chosen != choice(named, linked):
        since = ", ".join(name for name, _ in choice(named, linked)) or "none"
        before = ", ".join(name for name, _ in chosen)
        return unknown(f"NCCL 2.28 and newer would use {since}, as they want a link, older ones {before}")
    advice = "NCCL_SOCKET_IFNAME=<interface in the network that the nodes share>, on each node by its own name"
    if not chosen and named:
        return exposed(f"NCCL_SOCKET_IFNAME={named} ({where}) matches none of: {here or 'none'}", advice=advice)
    if not chosen:
        return unknown("no interface with an IPv4 address is up here")
    evidence = [f"NCCL would use {', '.join(name for name, _ in chosen)} of: {here}"]
    evidence += [f"NCCL_SOCKET_IFNAME={named} ({where})"] if named else []
    several = spans_nodes(params["nodes"])
    if several is False:
        return clear(*evidence, "the job stays on this node, where every interface will do")
    first = chosen[0]
    if not is_of_this_host_only(*first):
        virtual = [name for name, address in chosen[1:] if is_of_this_host_only(name, address)]
        if virtual and several:
            what = f"{', '.join(virtual)} leads nowhere, and NCCL sends data over all that it uses, without InfiniBand"
            return unknown(*evidence, what, advice=advice)
        return unknown(*evidence, f"whether the other nodes reach {first[1]} cannot be seen from here")
    if first[0].startswith("virbr") and not named and not version:
        return unknown(*evidence, "NCCL 2.28 and newer leave out virbr*, older ones would take it", advice=advice)
    if several:
        return exposed(*evidence, f"{first[0]} belongs to this host alone, and the job spans nodes", advice=advice)
    return unknown(*evidence, f"{first[0]} belongs to this host alone: right for one node, wrong for several (nodes=2)")


def is_of_this_host_only(name: str, address: str) -> bool:
    """Loopback, link-local, or a bridge or tunnel end that container runtimes and libvirt make; br-ex is none."""
    made = re.match(r"docker|br-[0-9a-f]{12}$|virbr|veth|lxc|lxdbr|cni|podman", name)
    return address.startswith(("127.", "169.254.")) or bool(made)


# --- two nodes of one host -----------------------------------------------------------------------------------------


def set_up_network(node: Context, bridge: bool) -> None:
    """First the bridge, if any, then the cable: the order in which NCCL sees them."""
    own_network()
    if Path("/etc/nccl.conf").exists():  # its settings for this host's interfaces are no part of the job
        bind_over("/dev/null", "/etc/nccl.conf")
    bring_up("lo")
    if bridge:
        lay_cable(BRIDGE, "kbbr1", os.getpid())
        bring_up("kbbr1")
        bring_up(BRIDGE, BRIDGES_ADDRESS)
    join_nodes(node, NIC)


def start_nccl(ctx: Context) -> None:
    """Both arms are this job. They differ in NCCL_SOCKET_IFNAME alone, which NCCL reads from the environment."""
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=20)
    total = torch.ones(1, device=ctx.device)
    dist.all_reduce(total)
    assert total.item() == ctx.world_size


STANDS_FOR = (
    "NCCL between GPUs: the address is chosen by this machine's libnccl, where one is installed, else by its rules; "
    "the connection of the other rank is a plain socket"
)

OWN_LOOPBACK = symptom(r"connect to 127\.0\.0\.1 \(this node's own\).*Connection refused")


def on_two_nodes(
    name: str, settings: Tuple[str, str], expect: Expect, because: str, fix: str, bridge: bool = True
) -> Experiment:
    """`settings` are the values of NCCL_SOCKET_IFNAME without and with the fix."""
    jobs = [partial(meet_over_nccl, interface=value, bridge=bridge) for value in settings]
    like: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": STANDS_FOR}
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect=expect, because=because, **like),
        treatment=Arm(jobs[1], expect=completed(), because=fix, **like),
        world_size=1,
        needs=Needs(packages={}),
        expected_s=(0.2, 0.2),
    )


probe = Probe(
    params={"nodes": Param("int", "how many nodes the job has; 0: as the launcher's variables say", 0)},
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                start_nccl,
                expect=raised(r"no socket interface found"),
                because="NCCL_SOCKET_IFNAME names an interface that this node does not have",
                fidelity="hardware",
                env={"NCCL_SOCKET_IFNAME": "kbnosuch0"},
            ),
            treatment=Arm(
                start_nccl,
                expect=completed(),
                because="NCCL_SOCKET_IFNAME=lo, which is there and right for one node",
                fidelity="hardware",
                env={"NCCL_SOCKET_IFNAME": "lo"},
            ),
            world_size=1,
            backend="nccl",
            needs=Needs(gpus=1),
            deadline_s=60,
            expected_s=(10, 10),
        ),
        on_two_nodes(
            "two-nodes",
            ("", NIC),
            symptom(rf"connect to {re.escape(BRIDGES_ADDRESS)} \(this node's own\).*Connection refused"),
            f"NCCL takes the first interface that is not docker* or lo, here {BRIDGE}",
            f"NCCL_SOCKET_IFNAME={NIC}, the interface between the nodes",
        ),
    ),
    variants=(
        on_two_nodes(
            "excluded",
            ("^docker0", "^lo,docker,br-,veth,virbr"),
            OWN_LOOPBACK,
            "NCCL_SOCKET_IFNAME=^docker0, so lo is no longer left out and comes first",
            "all that is of one host only is excluded, lo and the bridge with it",
        ),
        on_two_nodes(
            "list",
            ("lo", f"=eth0,{NIC}"),
            OWN_LOOPBACK,
            "NCCL_SOCKET_IFNAME=lo, as for one node",
            "the names of both kinds of nodes are listed, and each uses what it has",
        ),
        on_two_nodes(
            "fixed-name",
            ("eth0", ""),
            symptom(r"NCCL_SOCKET_IFNAME=eth0: .{1,40} found none, and there are: lo kb0"),
            "NCCL_SOCKET_IFNAME=eth0 on a node whose only card is called otherwise",
            "the setting is removed, and the one network of the node is taken",
            bridge=False,
        ),
    ),
)
