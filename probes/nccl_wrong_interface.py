"""Two nodes have a container bridge and a network between them: NCCL advertises the bridge, which leads nowhere."""

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

BRIDGE, NIC = "br-kb0", "kb0"  # the bridge of a container runtime on each node, and the network between the nodes
IFF_UP, IFF_RUNNING = 0x1, 0x40  # the interface is switched on; it also has a link
BRIDGE_ADDRESS = "172.31.83.1"  # the same on every node, as container runtimes choose it


def meet_over_nccl(ctx: Context, *, interface: str, bridge: bool = True) -> None:
    """Rank 0 makes NCCL's unique id, which contains its address; rank 1, on the other node, connects to it."""
    try:
        run_two_nodes(ctx, partial(connect_as_node, interface=interface, bridge=bridge))
    finally:
        if (ctx.dir / "id").exists():
            ctx.note(unique_id=(ctx.dir / "id").read_text())


def connect_as_node(node: Context, *, interface: str, bridge: bool) -> None:
    """What each of the two nodes does."""
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
    address, port_in_id = (node.dir / "id").read_text().split()[:2]
    try:
        socket.create_connection((address, int(port_in_id)), timeout=3).close()
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        where = " (this node's own)" if address in dict(interfaces()).values() else ""
        raise Symptom(f"rank 1: connect to {address}{where}, the address in the id, failed: {reason}") from error
    node.meet("connected")


def unique_id() -> Tuple[Any, str, int, str]:
    """The object that listens, the address and port in the id, and the name of what chose the address."""
    for nccl, version in nccl_libraries():
        buffer = (ctypes.c_char * 128)()
        if nccl.ncclGetUniqueId(buffer):
            no_interface(f"libnccl {version}")
        data = bytes(buffer)
        at = 8 if struct.unpack_from("=H", data, 8)[0] == socket.AF_INET else 0  # older releases: no magic number first
        port, packed = struct.unpack_from("!H4s", data, at + 2)
        return nccl, socket.inet_ntoa(packed), port, f"libnccl {version}"
    chosen = choose_interfaces(os.environ.get("NCCL_SOCKET_IFNAME", ""), interfaces())
    if not chosen:
        no_interface("NCCL's rules")
    listener = socket.create_server((chosen[0][1], 0))
    return listener, chosen[0][1], listener.getsockname()[1], "NCCL's rules, because no libnccl is installed"


def no_interface(by: str) -> NoReturn:
    present = " ".join(name for name, _ in interfaces())
    named = os.environ.get("NCCL_SOCKET_IFNAME")
    raise Symptom(f"NCCL_SOCKET_IFNAME={named}: {by} found no such interface; this node has: {present}")


# --- NCCL's rules --------------------------------------------------------------------------------------------------


def choose_interfaces(
    named: str, present: List[Tuple[str, str]], version: Tuple[int, ...] = ()
) -> List[Tuple[str, str]]:
    """The present interfaces that NCCL uses, in its order; the first one carries the bootstrap."""
    rules = ["ib", "^docker,lo", "docker", "lo"]
    if version >= (2, 28):
        rules = ["ib", "^docker,lo,virbr", "docker", "lo", "virbr"]
    for rule in [named] if len(named) > 1 else rules:
        excludes = rule.startswith("^")
        exact = rule[excludes:].startswith("=")
        words = [word.split(":")[0] for word in rule[excludes + exact :].split(",") if word]
        result = [
            (name, address)
            for name, address in present
            if any(name == word if exact else name.startswith(word) for word in words) != excludes
        ]
        if result:
            return result
    return []


def interfaces(flag: int = IFF_UP) -> List[Tuple[str, str]]:
    """Name and address of every interface with an IPv4 address and this flag, in the kernel's order."""
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
    """Adds the interfaces with only an IPv6 address, link-local or not, which NCCL takes after the others."""
    try:
        rows = [line.split() for line in Path("/proc/net/if_inet6").read_text().splitlines()]
    except OSError:  # IPv6 is switched off
        return present
    with_ipv4 = dict(interfaces())
    others = {row[5]: "with an IPv6 address only" for row in rows if row[5] not in with_ipv4 and row[5] != "lo"}
    return present + list(others.items())


def check(params: Mapping[str, Any]) -> Finding:
    """Which interface would NCCL take on this node, by its variable, its configuration files and its rules?"""
    named, where = nccl_setting("NCCL_SOCKET_IFNAME")
    family, _ = nccl_setting("NCCL_SOCKET_FAMILY")
    if family == "AF_INET6":
        return unknown("NCCL_SOCKET_FAMILY=AF_INET6, but this check knows only IPv4 addresses")
    if not named and nccl_setting("NCCL_COMM_ID")[0]:
        return unknown("NCCL_COMM_ID is set, and NCCL takes an interface in the network of that address if it has one")
    version = nccl_release()
    try:
        present, linked = interfaces(), interfaces(IFF_RUNNING)
    except OSError as error:
        return unknown(f"kb cannot list the interfaces: {error.strerror}")
    if version >= (2, 28):
        present = linked
    listed = ", ".join(f"{name} {address}" for name, address in present)
    chosen = choose_interfaces(named, present, version)
    with_ipv6 = choose_interfaces(named, with_ipv6_only(present), version) if family != "AF_INET" else chosen
    if chosen[:1] != with_ipv6[:1]:
        other = " ".join(with_ipv6[0])
        return unknown(f"NCCL may use {other}, but this check knows only what IPv4 addresses reach")
    if not version and chosen != choose_interfaces(named, linked):
        since = ", ".join(name for name, _ in choose_interfaces(named, linked)) or "none"
        before = ", ".join(name for name, _ in chosen)
        return unknown(f"NCCL 2.28 and newer would use {since}, because they need a link; older releases {before}")
    advice = "on each node, set NCCL_SOCKET_IFNAME to its interface in the network that the nodes share"
    if not chosen and named:
        return exposed(f"NCCL_SOCKET_IFNAME={named} ({where}) matches none of: {listed or 'none'}", advice=advice)
    if not chosen:
        return unknown("no interface with an IPv4 address is up on this node")
    evidence = [f"NCCL would use {', '.join(name for name, _ in chosen)} of: {listed}"]
    evidence += [f"NCCL_SOCKET_IFNAME={named} ({where})"] if named else []
    many_nodes = spans_nodes(params["nodes"])
    if many_nodes is False:
        return clear(*evidence, "the job stays on this node, where every interface works")
    first = chosen[0]
    if not is_of_this_host_only(*first):
        virtual = [name for name, address in chosen[1:] if is_of_this_host_only(name, address)]
        if virtual and many_nodes:
            what = f"without InfiniBand NCCL sends data over all of these, but {', '.join(virtual)} leads nowhere"
            return unknown(*evidence, what, advice=advice)
        return unknown(*evidence, f"kb cannot tell from this node whether the other nodes reach {first[1]}")
    if first[0].startswith("virbr") and not named and not version:
        return unknown(*evidence, "NCCL 2.28 and newer exclude virbr*, older releases would take it", advice=advice)
    if many_nodes:
        return exposed(*evidence, f"{first[0]} leads to no other host, and the job spans nodes", advice=advice)
    return unknown(*evidence, f"{first[0]} leads to no other host: right for one node, wrong for more (--set nodes=2)")


def is_of_this_host_only(name: str, address: str) -> bool:
    """Loopback, link-local, or a bridge or tunnel end of a container runtime or libvirt; br-ex is not one."""
    made = re.match(r"docker|br-[0-9a-f]{12}$|virbr|veth|lxc|lxdbr|cni|podman", name)
    return address.startswith(("127.", "169.254.")) or bool(made)


# --- two nodes of one host -----------------------------------------------------------------------------------------


def set_up_network(node: Context, bridge: bool) -> None:
    """Makes the bridge, if any, and then the network between the nodes: NCCL sees them in this order."""
    own_network()
    if Path("/etc/nccl.conf").exists():  # its settings are for the interfaces of this host, not of the two nodes
        bind_over("/dev/null", "/etc/nccl.conf")
    bring_up("lo")
    if bridge:
        lay_cable(BRIDGE, "kbbr1", os.getpid())
        bring_up("kbbr1")
        bring_up(BRIDGE, BRIDGE_ADDRESS)
    join_nodes(node, NIC)


def start_nccl(ctx: Context) -> None:
    """The job of both arms, which differ only in NCCL_SOCKET_IFNAME in the environment."""
    import torch

    ctx.reached()
    dist = ctx.init_process_group(timeout_s=20)
    total = torch.ones(1, device=ctx.device)
    dist.all_reduce(total)
    assert total.item() == ctx.world_size


STANDS_FOR = (
    "NCCL between GPUs; libnccl chooses the address if it is installed, else kb applies its rules, "
    "and the other rank connects with a plain socket"
)

OWN_LOOPBACK = symptom(r"connect to 127\.0\.0\.1 \(this node's own\).*Connection refused")


def on_two_nodes(
    name: str, settings: Tuple[str, str], expect: Expect, because: str, fix: str, bridge: bool = True
) -> Experiment:
    """`settings` are the values of NCCL_SOCKET_IFNAME without and with the fix."""
    jobs = [partial(meet_over_nccl, interface=value, bridge=bridge) for value in settings]
    fidelity: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": STANDS_FOR}
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect=expect, because=because, **fidelity),
        treatment=Arm(jobs[1], expect=completed(), because=fix, **fidelity),
        world_size=1,
        needs=Needs(packages={}),
        expected_s=(0.2, 0.2),
    )


probe = Probe(
    params={"nodes": Param("int", "number of nodes of the job; 0: kb reads the launcher's variables", 0)},
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
                because="NCCL_SOCKET_IFNAME=lo names an interface that every node has and that is right for one node",
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
            symptom(rf"connect to {re.escape(BRIDGE_ADDRESS)} \(this node's own\).*Connection refused"),
            f"NCCL takes the first interface that is not docker* or lo, which is {BRIDGE}, the container bridge",
            f"NCCL_SOCKET_IFNAME={NIC} names the interface in the network between the nodes",
        ),
    ),
    variants=(
        on_two_nodes(
            "excluded",
            ("^docker0", "^lo,docker,br-,veth,virbr"),
            OWN_LOOPBACK,
            "NCCL_SOCKET_IFNAME=^docker0 replaces the default that excludes lo, so NCCL takes lo first",
            "NCCL_SOCKET_IFNAME=^lo,docker,br-,veth,virbr excludes lo and the bridge as well",
        ),
        on_two_nodes(
            "list",
            ("lo", f"=eth0,{NIC}"),
            OWN_LOOPBACK,
            "NCCL_SOCKET_IFNAME=lo is left over from a run on one node",
            f"NCCL_SOCKET_IFNAME==eth0,{NIC} lists the names of both kinds of nodes, and each node uses its own",
        ),
        on_two_nodes(
            "fixed-name",
            ("eth0", ""),
            symptom(r"NCCL_SOCKET_IFNAME=eth0: .{1,60} found no such interface; this node has: lo kb0"),
            "NCCL_SOCKET_IFNAME=eth0, but the only network interface of the node has another name",
            "the setting is removed, so NCCL takes the only network interface of the node",
            bridge=False,
        ),
    ),
)
