"""Two nodes whose interfaces say 9000 bytes, and a path between them that drops every packet above 1500 in silence.

The second node's address is on a bridge of 9000 over a port of 1500, as a NIC or a switch port that was left out.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Optional, Tuple

from kb.host import file_text
from kb.namespaces import bring_up, join_nodes, lay_cable, own_network, run_two_nodes
from kb.probe import (
    GLOO_TIMEOUT,
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
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)
from kb.training_config import spans_nodes

NIC, BRIDGE, FAR = "kb0", "kbbr0", "kb1"  # the cable's end on either node; what holds the address of node 1
SMALL, LARGE = 100, 1 << 20  # elements: one packet of any size, and many full packets
JUMBO, USUAL = 9000, 1500
BOTH, FIRST = (0, 1), (0,)  # nodes


def train_on_two_nodes(ctx: Context, *, icmp: Optional[bool] = None, **how: Any) -> None:
    """Over a cable, or through a router if `icmp` says whether the router's ICMP arrives."""
    live = partial(train, **how) if icmp is None else partial(train_through_router, icmp=icmp)
    run_two_nodes(ctx, live, nodes_s=50.0)


def train(
    node: Context,
    *,
    port_mtu: int = USUAL,
    lowered: Tuple[int, ...] = (),
    late: Tuple[int, ...] = (),
    probing: Tuple[int, ...] = (),
    retries: int = 15,
    timeout_s: float = 4.0,
) -> None:
    """The port is that of node 1; `lowered` and `probing` name the nodes that the change is made on.

    `late` are those that are lowered when the job hangs already.
    """
    own_network()
    join_nodes(node, NIC)
    ip("addr flush dev %s" % NIC)
    ip("link add %s type bridge forward_delay 0" % BRIDGE)
    ip("link set %s master %s mtu %d" % (NIC, BRIDGE, port_mtu if node.rank == 1 else JUMBO))
    ip("link set %s mtu %d" % (BRIDGE, JUMBO))
    bring_up(BRIDGE, "10.83.0.%d" % (node.rank + 1))
    if node.rank in lowered:
        ip("link set %s mtu %d" % (BRIDGE, USUAL))
    kernel_setting("tcp_mtu_probing", int(node.rank in probing))
    kernel_setting("tcp_retries2", retries)
    reduce_twice(node, BRIDGE, timeout_s, lower_late=node.rank in late)


def train_through_router(node: Context, *, icmp: bool) -> None:
    """Two networks of 9000, and a router whose ways are of 1500. It says so by ICMP, unless that is lost."""
    own_network()
    join_nodes(node, NIC)
    ip("link set %s mtu %d" % (NIC, JUMBO))
    interface = NIC
    if node.rank == 1:  # this network becomes the router's, and the node gets one behind it
        interface = FAR
        own_pid = os.getpid()
        router = os.fork()
        if not router:
            try:
                route_packets(node.dir, icmp, own_pid)
            finally:
                os._exit(1)
        own_network()
        lay_cable(FAR, FAR, router)
        ip("link set %s mtu %d" % (FAR, JUMBO))
        bring_up(FAR, "10.83.1.2")
        (node.dir / "far cable").touch()
        while not (node.dir / "routing").exists():
            if os.waitpid(router, os.WNOHANG)[0]:
                raise Unavailable("this machine lets no namespace be a router with rules")
            time.sleep(0.01)
    ip("route add 10.83.%d.0/24 via 10.83.%d.%d" % (1 - node.rank, node.rank, 2 - node.rank))
    reduce_twice(node, interface, timeout_s=4.0)


def route_packets(directory: Path, icmp: bool, node_pid: int) -> None:
    """Until the node that started it is gone."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != node_pid:  # gone before it was asked for
        return
    while not (directory / "far cable").exists():
        time.sleep(0.01)
    ip("link set %s mtu %d" % (FAR, JUMBO))
    bring_up(FAR, "10.83.1.1")
    kernel_setting("ip_forward", 1)
    ip("route replace 10.83.0.1 dev %s mtu %d" % (NIC, USUAL))
    ip("route replace 10.83.1.2 dev %s mtu %d" % (FAR, USUAL))
    if not icmp:
        ip("rule add iif lo to 10.83.0.0/16 blackhole")  # what this network sends itself, as its ICMP
    (directory / "routing").touch()
    signal.pause()


def reduce_twice(node: Context, interface: str, timeout_s: float, lower_late: bool = False) -> None:
    """An all-reduce that is one small packet, then one that fills packets."""
    ip("link set %s gso_max_segs 1" % interface)  # a virtual cable would carry 64 KiB in one piece, whatever its MTU
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch

    torch.set_num_threads(1)
    dist = node.init_process_group(timeout_s=timeout_s)
    small, large = torch.ones(SMALL), torch.ones(LARGE)
    dist.all_reduce(small)
    assert bool((small == 2).all())
    assert node.meet("small one done")
    node.reached()
    stalled: List[str] = []
    threading.Thread(target=watch, args=(stalled,), daemon=True).start()
    if lower_late:
        threading.Timer(2.0, ip, ["link set %s mtu %d" % (interface, USUAL)]).start()
    started = time.monotonic()
    try:
        dist.all_reduce(large)
    except RuntimeError as error:
        if ": Connection timed out" in str(error):  # from TCP itself
            raise
        time.sleep(0.5 if stalled else 2)  # the node that was first, and the one whose packets are lost, say more
        if stalled:
            raise Symptom("%s Meanwhile ss says: %s" % (error, stalled[-1])) from error
        raise
    assert bool((large == 2).all())
    node.note(large_s=round(time.monotonic() - started, 2))
    assert node.meet("large one done")


def watch(stalled: List[str]) -> None:
    """What the kernel says of a connection whose packets are sent again, as long as this process lives."""
    while True:
        ran = subprocess.run(["ss", "-tin"], stdout=subprocess.PIPE, universal_newlines=True, check=False)
        stalled += [line.strip() for line in ran.stdout.splitlines() if "backoff:" in line and "unacked:" in line]
        time.sleep(0.2)


def ip(command: str) -> None:
    ran = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise Unavailable("ip %s: %s" % (command, ran.stderr.strip()))


def kernel_setting(name: str, value: int) -> None:
    path = Path("/proc/sys/net/ipv4", name)
    try:
        if path.read_text().strip() != str(value):
            path.write_text(str(value))
    except OSError as error:
        raise Unavailable("%s cannot be set here: %s" % (name, error.strerror)) from error


# --- the check -----------------------------------------------------------------------------------------------------

LINKS = Path("/sys/class/net")
ADVICE = "find the largest SIZE that `ping -M do -s SIZE OTHER_NODE` has an answer to; --set passes=N, N = SIZE + 28"
NAMED_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check(params: Mapping[str, Any]) -> Finding:
    """The MTU of each interface here and of what it lies on; what the path carries can only be measured."""
    if spans_nodes(params["nodes"]) is False:
        return clear("the job stays on this node, and sends nothing over a network")
    mtus = {name: mtu_of(name) for name in interfaces() if name != "lo"}
    mtus = {name: mtu for name, mtu in mtus.items() if mtu}
    if not mtus:
        return unknown("no interface here is up, or its MTU cannot be read", advice=ADVICE)
    evidence = ["MTU here: %s" % ", ".join("%s %d" % pair for pair in sorted(mtus.items()))]
    probing = file_text("/proc/sys/net/ipv4/tcp_mtu_probing")
    if probing in ("1", "2"):
        evidence.append(
            "tcp_mtu_probing=%s: connections that stall here find a smaller size after some seconds" % probing
        )
    if any(Path("/sys/class/infiniband").glob("*/ports/*")):
        evidence.append("RDMA ports have an MTU of their own: ibv_devinfo, active_mtu; compare it between nodes")
    used = {name: mtu for name, mtu in mtus.items() if named(name)} or mtus
    below = [
        "%s has %d and lies on %s, which has %d" % (name, mtu, lower, mtu_of(lower))
        for name, mtu in sorted(used.items())
        for lower in what_it_lies_on(name)
        if 0 < mtu_of(lower) < mtu
    ]
    if below:
        advice = "the same MTU on both: the larger one only where the switches carry it"
        return exposed(*evidence, *below, "packets in between are dropped without an error", advice=advice)
    passes = params["passes"]
    larger = sorted(name for name, mtu in used.items() if mtu > passes)
    if passes > 0 and len(larger) == len(used):
        sends = "packets of up to %d leave here, and no more than %d pass" % (min(used.values()), passes)
        interface = larger[0] if len(larger) == 1 else "INTERFACE"
        return exposed(*evidence, sends, advice="ip link set dev %s mtu %d, on every node" % (interface, passes))
    if passes > 0 and larger:
        return unknown(
            *evidence, "no more than %d pass; whether the job uses %s is unknown" % (passes, ", ".join(larger))
        )
    if passes > 0:
        return unknown(*evidence, "packets of %d passed; of other paths and nodes nothing is known" % passes)
    return unknown(*evidence, "what the path to the other nodes carries cannot be read here", advice=ADVICE)


def interfaces() -> List[str]:
    """Those that are up, as far as that is known; a tunnel's state is `unknown`."""
    names = sorted(path.name for path in LINKS.glob("*") if (path / "mtu").exists())
    return [name for name in names if file_text(LINKS / name / "operstate") in ("up", "unknown")]


def mtu_of(interface: str) -> int:
    text = file_text(LINKS / interface / "mtu")
    return int(text) if text.isascii() and text.isdecimal() else 0


def what_it_lies_on(interface: str) -> List[str]:
    """The network cards and bonds below a bridge, bond or VLAN; not the ends of containers, which only they use."""
    lower = [path.name[len("lower_") :] for path in (LINKS / interface).glob("lower_*")]
    return sorted(name for name in lower if any((LINKS / name / mark).exists() for mark in ("device", "bonding")))


def named(interface: str) -> bool:
    """By a variable that says what carries the data, read as a list of beginnings of names."""
    lists = [os.environ.get(name, "") for name in NAMED_BY]
    words = [word for text in lists if not text.startswith("^") for word in re.split("[,=:]", text) if word]
    return any(interface.startswith(word) for word in words)


# --- experiments ---------------------------------------------------------------------------------------------------

ENDED = GLOO_TIMEOUT + "|Connection closed by peer"
STALLED = symptom(rf"({ENDED}).{{1,300}} Meanwhile ss says: .{{1,200}}mss:8948 ")
DROPPED = "both ends send packets of 9000, and the port of node 1 takes 1500: the larger ones vanish"


def pair(
    name: str,
    fixed: Mapping[str, Any],
    fix: str,
    because: str = DROPPED,
    expect: Expect = STALLED,
    expected_s: Tuple[float, float] = (6.0, 4.0),
    **common: Any,
) -> Experiment:
    """`common` is the job of the control arm, `fixed` what the treatment arm changes in it."""
    return Experiment(
        name=name,
        control=Arm(partial(train_on_two_nodes, **common), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(
            partial(train_on_two_nodes, **{**common, **fixed}), expect=completed(), because=fix, fidelity="cpu"
        ),
        world_size=1,
        needs=Needs(packages={"torch": ">=2.1"}, programs=("ip", "ss")),
        deadline_s=60.0,
        expected_s=expected_s,
    )


BOTH_USUAL = "both ends send packets of 1500"

probe = Probe(
    params={
        "nodes": Param("int", "how many nodes the job has; 0: as the launcher's variables say", 0),
        "passes": Param("int", "the largest packet that reached another node: the size given to ping, plus 28", 0),
    },
    check=check,
    experiments=(pair("two-nodes", {"port_mtu": JUMBO}, "the port takes 9000 as well"),),
    variants=(
        pair("lowered", {"lowered": BOTH}, BOTH_USUAL),
        pair(
            "live",
            {"late": BOTH},
            "both ends are lowered while they hang, and send the lost packets again in smaller pieces",
            because=DROPPED + "; node 0, lowered while it hangs, no longer sends them, node 1 does",
            expected_s=(11.0, 6.0),
            timeout_s=10.0,
            late=FIRST,
        ),
        pair("one-end", {"lowered": FIRST}, "node 0 sends 1500, and announces it when it connects"),
        pair(
            "probing",
            {"probing": BOTH},
            "after some retries both nodes try smaller packets",
            because=DROPPED + ", also with three times the timeout",
            expected_s=(15.0, 11.0),
            timeout_s=12.0,
        ),
        pair(
            "one-probes",
            {"probing": BOTH},
            "both nodes try smaller packets",
            because="node 0 tries smaller packets, node 1 does not, and an all-reduce needs both",
            expected_s=(15.0, 11.0),
            timeout_s=12.0,
            probing=FIRST,
        ),
        pair(
            "icmp",
            {"icmp": True},
            "the router's ICMP arrives, and both ends send 1500 from then on",
            because="the router drops what is above 1500, and its ICMP about that is lost",
            icmp=False,
        ),
        pair(
            "gives-up",
            {"port_mtu": JUMBO},
            "the port takes 9000 as well",
            because="TCP gives up before the timeout of the collective, here after 3 retries in place of 15",
            expect=raised(r"pair\.cc:\d+\] .{0,60}: Connection timed out"),
            retries=3,
            timeout_s=14.0,
        ),
    ),
)
