"""Two nodes in namespaces of this host, whose names resolve to loopback: gloo offers that address to the other node."""

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

NIC = "kb0"  # the cable's end on either node


LOOPBACK = ("127.0.1.1", "127.0.1.1")  # what /etc/hosts gives for each node's own name, as in Debian and Ubuntu


def train_on_two_nodes(ctx: Context, *, interface: str, addresses: Sequence[str] = LOOPBACK) -> None:
    """Each node has its own network, name and /etc/hosts, which gives it that address, or none.

    `interface` is for GLOO_SOCKET_IFNAME, or empty.
    """
    if "::1" in addresses and not read_rows("/proc/net/if_inet6"):
        raise Unavailable("this machine has no IPv6")
    run_two_nodes(ctx, partial(train_as_node, interface=interface, addresses=addresses))


def train_as_node(node: Context, *, interface: str, addresses: Sequence[str]) -> None:
    set_up_network(node, addresses[node.rank])
    os.environ.pop("GLOO_SOCKET_IFNAME")  # the harness has set it to lo
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
    """A host name, which /etc/hosts maps to this address, and a cable to the other node."""
    name = f"kb-node-{node.rank}"
    hosts = node.dir / f"hosts{node.rank}"
    hosts.write_text("127.0.0.1 localhost\n" + (f"{address} {name}\n" if address else ""))
    own_network(name)
    bind_over(str(hosts), "/etc/hosts")
    if Path("/etc/resolv.conf").exists():
        bind_over(os.devnull, "/etc/resolv.conf")  # no name server is asked
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

SET_IT = "GLOO_SOCKET_IFNAME=<what the other nodes reach>, on every node by its own name: ip -br addr, without @..."


def check(params: Mapping[str, Any]) -> Finding:
    """What gloo would listen on here by its own rules: the named interfaces, or the host's first usable address."""
    several = spans_nodes(params["nodes"])
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if named:
        taken = {name: addresses_of(name) for name in named.split(",")}
        missing = [name for name, result in taken.items() if not result]
        if missing:
            here = ", ".join(name for _, name in socket.if_nameindex())
            return exposed(
                f"GLOO_SOCKET_IFNAME={named}: no interface with an address is called {' or '.join(missing)} here",
                f"interfaces: {here}; gloo compares the whole name: no prefix, no ^, no address",
                advice=SET_IT,
            )
        where = "; ".join(f"{name} has {' '.join(result)}" for name, result in taken.items())
        loops = [name for name, result in taken.items() if any(map(is_loopback, result))]
        return judge(f"GLOO_SOCKET_IFNAME={named}: {where}", bool(loops), several)
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
        return unknown(f"GLOO_SOCKET_IFNAME is not set and {host} could not be looked up: {error}")
    addresses = list(dict.fromkeys(line.split()[0] for line in lookup.stdout.splitlines() if line.split()))
    usable = [address for address in addresses if can_bind(address)]
    if not usable:
        seen = f"{host} resolves to {', '.join(addresses) or 'nothing'}, no address of this host: gloo takes 127.0.0.1"
        return judge(seen, True, several)
    return judge(f"{host} resolves to {usable[0]}, which gloo takes", is_loopback(usable[0]), several)


def judge(seen: str, loopback: bool, several: bool | None) -> Finding:
    if loopback and several:
        return exposed(seen, "the job spans nodes, and on another node this address is that node itself", advice=SET_IT)
    if loopback and several is None:
        return unknown(seen, "right for one node, wrong for several: `--set nodes=2` if the job spans nodes")
    if loopback:
        return clear(seen, "the job stays on this node")
    if several is False:
        return clear(seen, "the job stays on this node")
    return unknown(seen, "not a loopback address; whether the other nodes can reach it cannot be seen from here")


def addresses_of(interface: str) -> List[str]:
    """The addresses of an interface: IPv4, then IPv6 from /proc."""
    result = []
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            request = os.fsencode(interface)[:15].ljust(40, b"\0")
            result.append(socket.inet_ntoa(fcntl.ioctl(any_socket, 0x8915, request)[20:24]))  # SIOCGIFADDR
    except OSError as error:
        if error.errno not in (errno.ENODEV, errno.EADDRNOTAVAIL):
            return [f"an address that cannot be read ({error.strerror})"]
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
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(where)
        return True
    except (OSError, UnicodeError):  # a name that cannot be one
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
    """`jobs` are without and with the fix; each starts two nodes, unless the world is larger than one."""
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
    params={"nodes": Param("int", "how many nodes the job has; 0: as the launcher's variables say", 0)},
    check=check,
    experiments=(
        experiment(
            "two-nodes",
            UNNAMED_AND_NAMED,
            ("each node resolves its own name to 127.0.1.1, and that is what gloo gives to the other one", NAMED),
        ),
    ),
    variants=(
        experiment(
            "unresolved",
            (
                partial(train_on_two_nodes, interface="", addresses=("", "")),
                partial(train_on_two_nodes, interface=NIC, addresses=("", "")),
            ),
            ("no node resolves its own name, and gloo falls back on 127.0.0.1", NAMED),
        ),
        experiment(
            "families",
            (
                partial(train_on_two_nodes, interface="", addresses=("127.0.1.1", "::1")),
                partial(train_on_two_nodes, interface=NIC, addresses=("127.0.1.1", "::1")),
            ),
            ("one node's name is an IPv4 address, that of the other IPv6", NAMED),
            raised(r"ss1\.ss_family == ss2\.ss_family\. (2 vs 10|10 vs 2)"),
        ),
        experiment(
            "name",
            (partial(name_an_interface, interface="^docker0"), partial(name_an_interface, interface="lo")),
            ("GLOO_SOCKET_IFNAME is written as for NCCL", "it is the whole name of an interface that is there"),
            raised(r"Unable to find address for: \^docker0"),
            world_size=2,
        ),
        experiment(
            "other-variables",
            UNNAMED_AND_NAMED,
            ("NCCL's interface is named, and MASTER_ADDR is right; gloo reads neither", NAMED),
            env=OTHER_VARIABLES,
        ),
        experiment(
            "lazy-init",
            UNNAMED_AND_NAMED,
            ("pairs connect at the first collective, at the same address", NAMED),
            env={"TORCH_GLOO_LAZY_INIT": "1"},
            torch=">=2.8",
        ),
    ),
)
