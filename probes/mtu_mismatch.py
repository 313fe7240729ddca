"""Two nodes have an MTU of 9000, but the path between them silently drops every packet above 1500 bytes.

The address of the second node is on a bridge with MTU 9000 whose port has 1500, like a NIC or switch port that
somebody forgot to configure.
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

NIC, BRIDGE, FAR = "kb0", "kbbr0", "kb1"  # the cable's end on each node; the bridge; the far cable
SMALL, LARGE = 100, 1 << 20  # elements: one packet that fits any MTU, and many full packets
JUMBO, USUAL = 9000, 1500
BOTH, FIRST = (0, 1), (0,)  # nodes


def train_on_two_nodes(ctx: Context, *, icmp: Optional[bool] = None, **how: Any) -> None:
    """Trains over a cable; if `icmp` is set, through a router, and `icmp` says whether the router's ICMP arrives."""
    job = partial(train, **how) if icmp is None else partial(train_through_router, icmp=icmp)
    run_two_nodes(ctx, job, nodes_s=50.0)


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
    """`port_mtu` is the MTU of the port of node 1. The nodes in `lowered` get a lower MTU before the job starts.

    The nodes in `late` get a lower MTU while the job hangs. The nodes in `probing` use tcp_mtu_probing.
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
    """Two networks with MTU 9000, and a router whose routes have 1500. It reports this by ICMP, unless that is lost."""
    own_network()
    join_nodes(node, NIC)
    ip("link set %s mtu %d" % (NIC, JUMBO))
    interface = NIC
    if node.rank == 1:  # this namespace becomes the router's, and the node gets one behind it
        interface = FAR
        node_pid = os.getpid()
        router = os.fork()
        if not router:
            try:
                route_packets(node.dir, icmp, node_pid)
            finally:
                os._exit(1)
        own_network()
        lay_cable(FAR, FAR, router)
        ip("link set %s mtu %d" % (FAR, JUMBO))
        bring_up(FAR, "10.83.1.2")
        (node.dir / "far cable").touch()
        while not (node.dir / "routing").exists():
            if os.waitpid(router, os.WNOHANG)[0]:
                raise Unavailable("this machine does not allow a network namespace to be a router with rules")
            time.sleep(0.01)
    ip("route add 10.83.%d.0/24 via 10.83.%d.%d" % (1 - node.rank, node.rank, 2 - node.rank))
    reduce_twice(node, interface, timeout_s=4.0)


def route_packets(directory: Path, icmp: bool, node_pid: int) -> None:
    """Routes packets until the node that started this process ends."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != node_pid:  # the node ended before PR_SET_PDEATHSIG was set
        return
    while not (directory / "far cable").exists():
        time.sleep(0.01)
    ip("link set %s mtu %d" % (FAR, JUMBO))
    bring_up(FAR, "10.83.1.1")
    kernel_setting("ip_forward", 1)
    ip("route replace 10.83.0.1 dev %s mtu %d" % (NIC, USUAL))
    ip("route replace 10.83.1.2 dev %s mtu %d" % (FAR, USUAL))
    if not icmp:
        ip(
            "rule add iif lo to 10.83.0.0/16 blackhole"
        )  # drops the packets that the router itself sends, such as its ICMP
    (directory / "routing").touch()
    signal.pause()


def reduce_twice(node: Context, interface: str, timeout_s: float, lower_late: bool = False) -> None:
    """Runs an all-reduce that fits one small packet, then one that fills packets."""
    ip(
        "link set %s gso_max_segs 1" % interface
    )  # otherwise a virtual cable carries 64 KiB in one piece, whatever its MTU
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    import torch

    torch.set_num_threads(1)
    dist = node.init_process_group(timeout_s=timeout_s)
    small, large = torch.ones(SMALL), torch.ones(LARGE)
    dist.all_reduce(small)
    assert bool((small == 2).all())
    assert node.meet("small all-reduce done")
    node.reached()
    stalled: List[str] = []
    threading.Thread(target=watch_retransmissions, args=(stalled,), daemon=True).start()
    if lower_late:
        threading.Timer(2.0, ip, ["link set %s mtu %d" % (interface, USUAL)]).start()
    started = time.monotonic()
    try:
        dist.all_reduce(large)
    except RuntimeError as error:
        if ": Connection timed out" in str(error):  # TCP gave up
            raise
        time.sleep(0.5 if stalled else 2)  # lets the other node, whose packets may be lost, report first
        if stalled:
            raise Symptom("%s Meanwhile ss says: %s" % (error, stalled[-1])) from error
        raise
    assert bool((large == 2).all())
    node.note(large_s=round(time.monotonic() - started, 2))
    assert node.meet("large all-reduce done")


def watch_retransmissions(stalled: List[str]) -> None:
    """Collects, until the process ends, what ss prints about connections that send their packets again."""
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
        raise Unavailable("kb cannot set %s here: %s" % (name, error.strerror)) from error


# --- the check -----------------------------------------------------------------------------------------------------

LINKS = Path("/sys/class/net")
ADVICE = "find the largest SIZE for which `ping -M do -s SIZE OTHER_NODE` gets a reply, then --set passes=SIZE+28"
NAMED_BY = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check(params: Mapping[str, Any]) -> Finding:
    """Compares the MTU of each interface with that of the interface below it; only ping can measure the path."""
    if spans_nodes(params["nodes"]) is False:
        return clear("the job runs on one node, so it sends nothing over a network")
    mtus = {name: mtu_of(name) for name in interfaces() if name != "lo"}
    mtus = {name: mtu for name, mtu in mtus.items() if mtu}
    if not mtus:
        return unknown("kb found no interface that is up and whose MTU it can read", advice=ADVICE)
    evidence = ["MTU here: %s" % ", ".join("%s %d" % pair for pair in sorted(mtus.items()))]
    probing = file_text("/proc/sys/net/ipv4/tcp_mtu_probing")
    if probing in ("1", "2"):
        evidence.append(
            "tcp_mtu_probing=%s: a connection that stalls here tries smaller packets after some seconds" % probing
        )
    if any(Path("/sys/class/infiniband").glob("*/ports/*")):
        evidence.append("RDMA ports have a separate MTU: compare active_mtu of ibv_devinfo between nodes")
    used = {name: mtu for name, mtu in mtus.items() if is_named(name)} or mtus
    below = [
        "%s has MTU %d, but %s below it has %d" % (name, mtu, lower, mtu_of(lower))
        for name, mtu in sorted(used.items())
        for lower in interfaces_below(name)
        if 0 < mtu_of(lower) < mtu
    ]
    if below:
        advice = "set the same MTU on both; use the larger one only if the switches carry it"
        return exposed(*evidence, *below, "packets between these two sizes are dropped without an error", advice=advice)
    passes = params["passes"]
    larger = sorted(name for name, mtu in used.items() if mtu > passes)
    if passes > 0 and len(larger) == len(used):
        sends = "this node sends packets of up to %d bytes, but the path passes at most %d" % (
            min(used.values()),
            passes,
        )
        interface = larger[0] if len(larger) == 1 else "INTERFACE"
        return exposed(*evidence, sends, advice="run on every node: ip link set dev %s mtu %d" % (interface, passes))
    if passes > 0 and larger:
        return unknown(
            *evidence,
            "the path passes at most %d; kb cannot tell whether the job uses %s" % (passes, ", ".join(larger)),
        )
    if passes > 0:
        return unknown(*evidence, "packets of %d bytes passed; kb does not know about other paths and nodes" % passes)
    return unknown(*evidence, "kb cannot read the MTU of the path to the other nodes", advice=ADVICE)


def interfaces() -> List[str]:
    """The interfaces that are up or, like tunnels, have the state `unknown`."""
    names = sorted(path.name for path in LINKS.glob("*") if (path / "mtu").exists())
    return [name for name in names if file_text(LINKS / name / "operstate") in ("up", "unknown")]


def mtu_of(interface: str) -> int:
    text = file_text(LINKS / interface / "mtu")
    return int(text) if text.isascii() and text.isdecimal() else 0


def interfaces_below(interface: str) -> List[str]:
    """The network cards and bonds below a bridge, bond or VLAN, without the ends of cables to containers."""
    lower = [path.name[len("lower_") :] for path in (LINKS / interface).glob("lower_*")]
    return sorted(name for name in lower if any((LINKS / name / mark).exists() for mark in ("device", "bonding")))


def is_named(interface: str) -> bool:
    """Whether a variable of NCCL or gloo names the interface; its words are prefixes of names."""
    lists = [os.environ.get(name, "") for name in NAMED_BY]
    words = [word for text in lists if not text.startswith("^") for word in re.split("[,=:]", text) if word]
    return any(interface.startswith(word) for word in words)


# --- experiments ---------------------------------------------------------------------------------------------------

HANG_ENDED = GLOO_TIMEOUT + "|Connection closed by peer"
STALLED = symptom(rf"({HANG_ENDED}).{{1,300}} Meanwhile ss says: .{{1,200}}mss:8948 ")
DROPPED = "both nodes send packets of 9000 bytes, but the port of node 1 drops those above 1500"


def pair(
    name: str,
    fixed: Mapping[str, Any],
    fix: str,
    because: str = DROPPED,
    expect: Expect = STALLED,
    expected_s: Tuple[float, float] = (6.0, 4.0),
    **common: Any,
) -> Experiment:
    """`common` are the arguments of the control arm; `fixed` are those that the treatment arm changes or adds."""
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


BOTH_USUAL = "both nodes send packets of 1500 bytes"
PORT_JUMBO = "the port of node 1 also has an MTU of 9000"

probe = Probe(
    params={
        "nodes": Param("int", "number of nodes of the job; 0 reads it from the launcher's variables", 0),
        "passes": Param("int", "largest packet that reached another node: the size passed to ping, plus 28", 0),
    },
    check=check,
    experiments=(pair("two-nodes", {"port_mtu": JUMBO}, PORT_JUMBO),),
    variants=(
        pair("lowered", {"lowered": BOTH}, BOTH_USUAL),
        pair(
            "live",
            {"late": BOTH},
            "both nodes get MTU 1500 while they hang, and send the lost packets again in smaller pieces",
            because="the port of node 1 drops packets above 1500, and only node 0 gets MTU 1500 while the job hangs",
            expected_s=(11.0, 6.0),
            timeout_s=10.0,
            late=FIRST,
        ),
        pair(
            "one-end",
            {"lowered": FIRST},
            "node 0 has MTU 1500 and announces it when it connects, so node 1 sends small packets too",
        ),
        pair(
            "probing",
            {"probing": BOTH},
            "both nodes use tcp_mtu_probing, and try smaller packets after some retries",
            because=DROPPED + "; a longer timeout does not help",
            expected_s=(15.0, 11.0),
            timeout_s=12.0,
        ),
        pair(
            "one-probes",
            {"probing": BOTH},
            "both nodes use tcp_mtu_probing and try smaller packets",
            because="node 0 tries smaller packets, but node 1 does not, and an all-reduce needs both",
            expected_s=(15.0, 11.0),
            timeout_s=12.0,
            probing=FIRST,
        ),
        pair(
            "icmp",
            {"icmp": True},
            "the router's ICMP arrives, and both nodes then send packets of 1500 bytes",
            because="the router drops packets above 1500 bytes, and the ICMP with which it reports this is lost",
            icmp=False,
        ),
        pair(
            "gives-up",
            {"port_mtu": JUMBO},
            PORT_JUMBO,
            because="TCP gives up before the collective times out, here after 3 retries instead of 15",
            expect=raised(r"pair\.cc:\d+\] .{0,60}: Connection timed out"),
            retries=3,
            timeout_s=14.0,
        ),
    ),
)
