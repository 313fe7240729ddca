"""The names of two nodes resolve to loopback, so gloo offers that address to the other node. Nodes are namespaces."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, List, Mapping, Sequence, Tuple

from kb.namespaces import bind_over, bring_up, join_nodes, own_network, run_two_nodes
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)
from kb.training_config import spans_nodes

NIC = "kb0"  # the cable's end on each node
LOOPBACK = ("127.0.1.1", "127.0.1.1")  # of each node's own name in /etc/hosts, as in Debian and Ubuntu


def train_on_two_nodes(ctx: Context, *, interface: str, addresses: Sequence[str] = LOOPBACK) -> None:
    """Each node has its own network, name, and /etc/hosts, which maps the name to its address in `addresses`, if any.

    `interface` is the value of GLOO_SOCKET_IFNAME; if it is empty, the variable is not set.
    """
    if "::1" in addresses and not read_rows("/proc/net/if_inet6"):
        raise Unavailable("this machine has no IPv6")
    run_two_nodes(ctx, partial(train_as_node, interface=interface, addresses=addresses))


def train_as_node(node: Context, *, interface: str, addresses: Sequence[str]) -> None:
    set_up_network(node, addresses[node.rank])
    os.environ.pop("GLOO_SOCKET_IFNAME")  # kb sets it to lo
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch

    node.reached()
    dist = node.init_process_group(timeout_s=3)
    total = torch.full((1,), node.rank + 1.0)
    dist.all_reduce(total)
    assert total.item() == 3, total
    node.meet("reduced")


def set_up_network(node: Context, address: str) -> None:
    """Gives the node a host name, which /etc/hosts maps to `address`, and a cable to the other node."""
    name = f"kb-node-{node.rank}"
    hosts = node.dir / f"hosts{node.rank}"
    hosts.write_text("127.0.0.1 localhost\n" + (f"{address} {name}\n" if address else ""))
    own_network(name)
    bind_over(str(hosts), "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        bind_over(os.devnull, "/etc/resolv.conf")  # the node then asks no name server
    bring_up("lo")
    join_nodes(node, NIC)


def name_an_interface(ctx: Context, *, interface: str) -> None:
    import torch

    os.environ["GLOO_SOCKET_IFNAME"] = interface
    ctx.reached()
    dist = ctx.init_process_group(timeout_s=5)
    total = torch.full((1,), ctx.rank + 1.0)
    dist.all_reduce(total)
    assert total.item() == 3


# --- the check: which address would gloo take on this node? ---------------------------------------------------------

SET_IT = "set GLOO_SOCKET_IFNAME on every node to the interface that other nodes reach (ip -br addr, without @...)"


def check(params: Mapping[str, Any]) -> Finding:
    """Which address would gloo use here: that of the named interfaces, or the first usable one of the host's name?"""
    spans = spans_nodes(params["nodes"])
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        found = {name: addresses_of(name) for name in named.split(",")}
        missing = [name for name, result in found.items() if not result]
        if missing:
            here = ", ".join(name for _, name in socket.if_nameindex())
            return exposed(
                f"GLOO_SOCKET_IFNAME={named}, but this node has no interface {' or '.join(missing)} with an address",
                f"interfaces: {here}; gloo compares whole names, and accepts no prefix, no ^ and no address",
                advice=SET_IT,
            )
        addresses_by_name = "; ".join(f"{name} has {' '.join(result)}" for name, result in found.items())
        loopback = any(is_loopback(address) for result in found.values() for address in result)
        return judge(f"GLOO_SOCKET_IFNAME={named}: {addresses_by_name}", loopback, spans)
    host = socket.gethostname()
    try:
        lookup = subprocess.run(
            ["getent", "ahosts", host],
            stdout=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=0.7,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return unknown(f"GLOO_SOCKET_IFNAME is not set, and kb cannot look up {host}: {error}")
    addresses = list(dict.fromkeys(line.split()[0] for line in lookup.stdout.splitlines() if line.split()))
    usable = [address for address in addresses if can_bind(address)]
    if not usable:
        names = ", ".join(addresses) or "nothing"
        return judge(f"{host} resolves to {names}, not to an address of this host: gloo uses 127.0.0.1", True, spans)
    return judge(f"{host} resolves to {usable[0]}, which gloo uses", is_loopback(usable[0]), spans)


def judge(message: str, loopback: bool, spans: bool | None) -> Finding:
    if loopback and spans:
        reason = "the job spans nodes, but on another node this address means that node itself"
        return exposed(message, reason, advice=SET_IT)
    if loopback and spans is None:
        return unknown(message, "this is right on one node and wrong on more: use --set nodes=2 if the job spans nodes")
    if loopback or spans is False:
        return clear(message, "the job runs on one node")
    return unknown(message, "this is not a loopback address, but kb cannot tell whether other nodes can reach it")


def addresses_of(interface: str) -> List[str]:
    """The addresses of an interface: IPv4, then IPv6 from /proc."""
    result = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = os.fsencode(interface)[:15].ljust(40, b"\0")
            result.append(socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24]))  # SIOCGIFADDR
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            return [f"an address that kb cannot read ({error.strerror})"]
    rows = read_rows("/proc/net/if_inet6")
    return result + [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows if row[5] == interface]


def read_rows(path: str) -> List[List[str]]:
    try:
        return [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return []


def can_bind(address: str) -> bool:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as candidate:
            candidate.bind(where)
        return True
    except (OSError, UnicodeError):  # not a valid name
        return False


def is_loopback(address: str) -> bool:
    return address.startswith("127.") or address == "::1"


REFUSED = raised(r"connectFullMesh failed with .*(Connection refused|no error)|connect.*Connection refused")
NAMED = "GLOO_SOCKET_IFNAME names the interface between the nodes"


def experiment(
    name: str,
    jobs: Tuple[Callable[[Context], None], Callable[[Context], None]],
    because: Tuple[str, str],
    expect: Expect = REFUSED,
    env: Mapping[str, str] = MappingProxyType({}),
    world_size: int = 1,
    torch: str = ">=2.1",
) -> Experiment:
    """`jobs` are the jobs without and with the fix. Each starts two nodes, unless `world_size` is larger than one."""
    return Experiment(
        name=name,
        control=Arm(jobs[0], expect=expect, because=because[0], fidelity="cpu", env=env),
        treatment=Arm(jobs[1], expect=completed(), because=because[1], fidelity="cpu", env=env),
        world_size=world_size,
        needs=Needs(packages={"torch": torch}),
        expected_s=(0.2, 0.2),
    )


UNNAMED_AND_NAMED = (partial(train_on_two_nodes, interface=""), partial(train_on_two_nodes, interface=NIC))
OTHER_VARIABLES = {"NCCL_SOCKET_IFNAME": NIC, "NCCL_IB_DISABLE": "1", "MASTER_ADDR": "10.83.0.1"}

probe = Probe(
    params={"nodes": Param("int", "number of nodes of the job; 0 reads it from the launcher's variables", 0)},
    check=check,
    experiments=(
        experiment(
            "two-nodes",
            UNNAMED_AND_NAMED,
            ("each node resolves its own name to 127.0.1.1, and gloo passes that address to the other node", NAMED),
        ),
    ),
    variants=(
        experiment(
            "unresolved",
            (
                partial(train_on_two_nodes, interface="", addresses=("", "")),
                partial(train_on_two_nodes, interface=NIC, addresses=("", "")),
            ),
            ("no node resolves its own name, so gloo falls back to 127.0.0.1", NAMED),
        ),
        experiment(
            "families",
            (
                partial(train_on_two_nodes, interface="", addresses=("127.0.1.1", "::1")),
                partial(train_on_two_nodes, interface=NIC, addresses=("127.0.1.1", "::1")),
            ),
            ("the name of one node resolves to an IPv4 address, that of the other to an IPv6 address", NAMED),
            raised(r"ss1\.ss_family == ss2\.ss_family\. (2 vs 10|10 vs 2)"),
        ),
        experiment(
            "name",
            (partial(name_an_interface, interface="^docker0"), partial(name_an_interface, interface="lo")),
            (
                "GLOO_SOCKET_IFNAME is ^docker0, a syntax that only NCCL understands",
                "GLOO_SOCKET_IFNAME is the whole name of an existing interface",
            ),
            raised(r"Unable to find address for: \^docker0"),
            world_size=2,
        ),
        experiment(
            "other-variables",
            UNNAMED_AND_NAMED,
            ("NCCL_SOCKET_IFNAME and MASTER_ADDR are right, but gloo does not choose its address by them", NAMED),
            env=OTHER_VARIABLES,
        ),
        experiment(
            "lazy-init",
            UNNAMED_AND_NAMED,
            ("with TORCH_GLOO_LAZY_INIT=1 pairs connect at the first collective, but to the same address", NAMED),
            env={"TORCH_GLOO_LAZY_INIT": "1"},
            torch=">=2.8",
        ),
    ),
)
