"""Two nodes train over a cable that goes down during the run, and the transport gives up after its retries.

TCP stands for InfiniBand: `tcp_retries2` has the role of NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import struct
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Dict, Iterable, List, Mapping, Tuple

from kb.host import file_text
from kb.namespaces import bring_up, join_nodes, lay_cable, own_network, run_two_nodes
from kb.probe import (
    Arm,
    Context,
    Expect,
    Experiment,
    Finding,
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

GOOD, BAD = "kb1", "kb0"  # two cables connect the nodes; only the bad one goes down
STEPS, DOWN_STEP, FOR_GOOD = 7, 4, 60.0
SWITCH = 0x8914  # SIOCSIFFLAGS of netdevice(7)


def train(
    node: Context, *, down_s: float = 0.0, cable: str = BAD, retries: int = 2, slowest_s: float = FOR_GOOD
) -> None:
    """Runs an all-reduce in each step; before one of them the bad cable goes down for `down_s` seconds.

    Raises Symptom if a step takes more than `slowest_s` seconds and TCP retransmitted packets.
    """
    own_network()
    join_nodes(node, BAD)
    if node.rank == 0:
        lay_cable(GOOD, GOOD, int((node.dir / "pid1").read_text()))
    node.meet("second cable")
    bring_up(GOOD, "10.83.1.%d" % (node.rank + 1))
    try:
        Path("/proc/sys/net/ipv4/tcp_retries2").write_text(str(retries))
    except OSError as error:
        raise Unavailable(f"kb cannot set the retries of TCP here: {error.strerror}") from error
    os.environ["GLOO_SOCKET_IFNAME"] = cable
    import torch

    torch.set_num_threads(1)
    dist = node.init_process_group(timeout_s=14)
    gradients, times = torch.empty(1 << 16), []
    node.reached()
    for step in range(STEPS):
        if step == DOWN_STEP and down_s:
            if node.rank == 0:
                switch(BAD, on=False)
                threading.Timer(down_s, switch, [BAD], {"on": True}).start()
            node.meet("down")
        started = time.monotonic()
        dist.all_reduce(gradients.fill_(node.rank + 1))
        times.append(time.monotonic() - started)
        assert bool((gradients == 3).all())
    resent = retransmissions(node)
    node.note(slowest_step_s=round(max(times), 3), sent_again=resent)
    if max(times) > slowest_s and resent:
        usual = "%.1f s where others take %.1f s" % (max(times), median(times))
        raise Symptom("a step took %s; packets sent again: %d" % (usual, resent))


def switch(interface: str, *, on: bool) -> None:
    """Sets the interface up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SWITCH, struct.pack("=16sH22x", interface.encode(), 0x41 if on else 0))


def retransmissions(node: Context) -> int:
    """Returns how many TCP segments both nodes have retransmitted."""
    names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"]
    (node.dir / ("sent%d" % node.rank)).write_text(values[names.index("RetransSegs")])
    assert node.meet("counted")
    return sum(int((node.dir / ("sent%d" % rank)).read_text()) for rank in range(2))


# --- the check: do the error counters of the InfiniBand and RoCE ports grow? ----------------------------------------

DEVICES, BETWEEN_S = Path("/sys/class/infiniband"), 0.3
DOWN = ("link_downed", "link_error_recovery", "carrier_down_count")  # the link went down
LOST = (  # packets were damaged, dropped, or not acknowledged in time
    "symbol_error", "port_rcv_errors", "port_xmit_discards", "local_ack_timeout_err", "packet_seq_err",
    "implied_nak_seq_err", "req_transport_retries_exceeded",
    "to_retransmits", "seq_err_naks_rcvd", "max_retry_exceeded",
)  # fmt: skip
RETRANSMITTED = ("local_ack_timeout_err", "to_retransmits")  # the names in mlx5 and bnxt_re
HINT = ("out_of_sequence", "roce_adp_retrans")  # adaptive routing and slow acknowledgements also raise these
TRAFFIC = ("port_xmit_data", "port_rcv_data")
FULL = {"link_downed": 255, "link_error_recovery": 255, **dict.fromkeys(LOST[:3], 65535)}  # where narrow counters stop
PLACES = ("ports/*/counters/*", "ports/*/hw_counters/*", "device/net/*/carrier_down_count")
LINE = re.compile(r"([^/\s]+)/(?:ports/(\d+)/(?:hw_)?counters|device/net/([^/\s]+))/(\w+):(\d{1,20})$")

Counters = Dict[Tuple[str, str], int]  # (device:port, name) to value


def look(root: Path) -> Counters:
    """Reads the counters below `root`; it leaves out those that cannot be read."""
    paths = [path for place in PLACES for path in root.glob(f"*/{place}")]
    return parse(f"{path}:{file_text(path)}" for path in paths if path.name in DOWN + LOST + HINT + TRAFFIC)


def parse(lines: Iterable[str]) -> Counters:
    """Parses lines in the format of `grep -H .`."""
    matches = [LINE.search(line.strip()) for line in lines]
    return {(f"{match[1]}:{match[2] or match[3]}", match[4]): int(match[5]) for match in matches if match}


def growth(before: Counters, after: Counters, names: Tuple[str, ...]) -> List[str]:
    """Describes the counters with these names that are higher in `after`; a counter must be in both."""
    grown = [key for key in sorted(after) if key[1] in names and after[key] > before.get(key, after[key])]
    return [f"{port} {name} {before[port, name]} -> {after[port, name]}" for port, name in grown]


def check(params: Mapping[str, Any]) -> Finding:
    """Do the error counters of this node's ports grow now, or since the saved counters? Totals alone prove nothing."""
    root, saved = Path(str(params["root"])), params["earlier"]
    try:
        states = {f"{path.parts[-4]}:{path.parts[-2]}": file_text(path) for path in root.glob("*/ports/*/state")}
        layers = {f"{path.parts[-4]}:{path.parts[-2]}": file_text(path) for path in root.glob("*/ports/*/link_layer")}
        first = look(root)
        time.sleep(BETWEEN_S if first and root == DEVICES else 0)  # a copy does not change
        now = look(root)
    except (OSError, ValueError) as error:
        return unknown(f"kb cannot read {root}: {type(error).__name__}")
    if not states:
        return unknown(f"{root} has no RDMA port: this node has none, or the container was given none")
    evidence = [f"{port} {state or 'state is unreadable'}" for port, state in sorted(states.items())[:16]]
    errors = {key: value for key, value in sorted(now.items()) if key[1] in DOWN + LOST}
    if not errors:
        return unknown(
            *evidence, "kb can read no error counter here, as in a container or on a virtual function", advice=ON_HOST
        )
    live = growth(first, now, (*DOWN, "symbol_error"))
    if live:
        return exposed(*evidence, *live, f"these counters grew within {BETWEEN_S} s", advice=REPAIR)
    evidence += [f"{line} within {BETWEEN_S} s" for line in growth(first, now, LOST)]
    full = [f"{port} {name} is at its limit" for (port, name), count in errors.items() if count == FULL.get(name)]
    earlier = parse(file_text(str(saved)).splitlines()[:100_000]) if saved else {}
    if not earlier:
        totals = [f"{port} {name} {value}" for (port, name), value in errors.items() if value][:16]
        evidence += totals or ["every error counter that kb can read is 0"]
        evidence += (
            ["these totals began when the driver was loaded; they include restarts of a switch"] if totals else []
        )
        evidence += [f"{saved} has no counters"] if saved else []
        return unknown(*evidence, *full, "no link fails now; only a later comparison can show a failure", advice=SAVE)
    return compare(earlier, now, states, layers, evidence, full)


def compare(
    earlier: Counters,
    now: Counters,
    states: Mapping[str, str],
    layers: Mapping[str, str],
    evidence: List[str],
    full: List[str],
) -> Finding:
    """Compares with the `earlier` counters. `states` and `layers` are by port; `full` names counters at their limit."""
    both = [key for key in now if key in earlier]
    lower = [(port, name) for port, name in both if now[port, name] < earlier[port, name]]
    restarted = {port.split(":")[0] for port, name in lower if name in DOWN + TRAFFIC}  # these never wrap around
    down = [line for line in growth(earlier, now, DOWN) if line.split(":")[0] not in restarted]
    if down:
        return exposed(*evidence, *down, advice=REPAIR)
    lost = growth(earlier, now, LOST + HINT)
    if lost and not restarted:
        why = (
            "packets were lost or late, but no link of this node went down: see other links, the switches and the peers"
        )
        advice = "read the drop counters of the switches, and run this check on the peers"
        return unknown(*evidence, *lost, why, advice=advice)
    active = [port for port, state in states.items() if state.endswith("ACTIVE")]
    doubts = [f"{port} {name} is lower than before: the node was rebooted or the counter reset" for port, name in lower]
    # a RoCE port may not count in link_downed, but its network interface counts the lost carrier
    watched = {port.split(":")[0] for port, name in both if name == "carrier_down_count"}
    watched |= {port for port, name in both if name == "link_downed" and layers.get(port) == "InfiniBand"}
    doubts += [
        f"{port} has no counter of lost links in both readings"
        for port in active
        if not {port, port.split(":")[0]} & watched
    ]
    counted = {port for port, name in both if name in RETRANSMITTED}
    doubts += [f"{port} has no counter of retransmissions in both readings" for port in active if port not in counted]
    carried = {line.split()[0] for line in growth(earlier, now, TRAFFIC)}
    doubts += [f"{port} carried no traffic between the readings" for port in active if port not in carried]
    doubts += full if active else ["no port is active"]
    if doubts:
        return unknown(*evidence, *doubts, advice=SAVE)
    return clear(*evidence, "no error was counted while these ports carried traffic; kb sees no switches and no peers")


SAVE = "save the counters with grep as the entry says, and after the next failure run --set earlier=FILE"
REPAIR = (
    "if nobody restarted the node or the switch or disabled the port, drain the node and have cable and module examined"
)
ON_HOST = "run this on the host itself"

# --- the experiments -----------------------------------------------------------------------------------------------

CABLE = "two hosts with InfiniBand; the probe uses two network namespaces with a virtual cable, and gloo over TCP"
GAVE_UP = raised(r"Read error \[[\d.]+\]:\d+: (Connection timed out|No route to host|Network is unreachable)")
HICCUP = symptom(r"a step took [1-9]\.\d s where others take 0\.\d s; packets sent again: [1-9]")


def pair(name: str, because: str, fix: str, change: Mapping[str, Any], expect: Expect = GAVE_UP, **common: Any) -> Any:
    """Returns an experiment; both arms have `common`, and the treatment arm has `change` as well."""
    failing, fixed = (partial(run_two_nodes, live=partial(train, **how)) for how in (common, {**common, **change}))
    return Experiment(
        name=name,
        control=Arm(failing, expect, because, "stand-in", CABLE),
        treatment=Arm(fixed, completed(), fix, "stand-in", CABLE),
        world_size=1,
        expected_s=(3.0, 1.5),
    )


UP, STAYS_UP = {"down_s": 0.0}, "the cable stays up"
TOO_LONG = "the cable goes down during the run for longer than the transport retries"
OTHER = "the same cable goes down, but the job uses the other one"
SHORT = "the cable is down for 2.4 s and the transport gives up after 1.4 s"
CUT = "the transport retries for twice as long, but the cable does not come back"
SURVIVED = "the cable is down for 1.3 s, which the transport survives"

probe = Probe(
    params={
        "root": Param(
            "path",
            "another node's: in /sys/class/infiniband `cp -r --parents */ports */device/net/*/carrier_down_count DIR`",
            str(DEVICES),
        ),
        "earlier": Param("path", "counters that were saved earlier with grep -H ."),
    },
    check=check,
    experiments=(pair("link", TOO_LONG, STAYS_UP, UP, down_s=FOR_GOOD),),
    variants=(
        pair("other-card", TOO_LONG, OTHER, {"cable": GOOD}, down_s=FOR_GOOD),
        pair("patience", SHORT, "the transport retries for 25 s", {"retries": 6}, down_s=2.4),
        pair(
            "patience-cut", CUT, "the transport retries as long, and the cable stays up", UP, down_s=FOR_GOOD, retries=3
        ),
        pair("hiccup", SURVIVED, STAYS_UP, UP, HICCUP, down_s=1.3, retries=6, slowest_s=1.1),
    ),
)
