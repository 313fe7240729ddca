"""Two nodes train over a cable that goes down in mid-run, with a transport that sends again only so often.

TCP takes the place of the cards: its retries (`tcp_retries2`) are what NCCL_IB_TIMEOUT and NCCL_IB_RETRY_CNT are there.
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

GOOD, BAD = "kb1", "kb0"  # two cables between the nodes; only the bad one goes down
STEPS, AT, FOR_GOOD = 7, 4, 60.0
SWITCH = 0x8914  # SIOCSIFFLAGS of netdevice(7)


def train(
    node: Context, *, down_s: float = 0.0, cable: str = BAD, retries: int = 2, slowest_s: float = FOR_GOOD
) -> None:
    """All-reduce in steps. In one of them the bad cable goes down for `down_s` seconds."""
    own_network()
    join_nodes(node, BAD)
    if node.rank == 0:
        lay_cable(GOOD, GOOD, int((node.dir / "pid1").read_text()))
    node.meet("second cable")
    bring_up(GOOD, "10.83.1.%d" % (node.rank + 1))
    try:
        Path("/proc/sys/net/ipv4/tcp_retries2").write_text(str(retries))
    except OSError as error:
        raise Unavailable(f"the retries of TCP cannot be set here: {error.strerror}") from error
    os.environ["GLOO_SOCKET_IFNAME"] = cable
    import torch

    torch.set_num_threads(1)
    dist = node.init_process_group(timeout_s=14)
    gradients, times = torch.empty(1 << 16), []
    node.reached()
    for step in range(STEPS):
        if step == AT and down_s:
            if node.rank == 0:
                switch(BAD, on=False)
                threading.Timer(down_s, switch, [BAD], {"on": True}).start()
            node.meet("down")
        started = time.monotonic()
        dist.all_reduce(gradients.fill_(node.rank + 1))
        times.append(time.monotonic() - started)
        assert bool((gradients == 3).all())
    again = sent_again(node)
    node.note(slowest_step_s=round(max(times), 3), sent_again=again)
    if max(times) > slowest_s and again:
        usual = "%.1f s where others take %.1f s" % (max(times), median(times))
        raise Symptom("a step took %s; packets sent again: %d" % (usual, again))


def switch(interface: str, *, on: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SWITCH, struct.pack("=16sH22x", interface.encode(), 0x41 if on else 0))


def sent_again(node: Context) -> int:
    """By both nodes."""
    names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if line[:4] == "Tcp:"]
    (node.dir / ("sent%d" % node.rank)).write_text(values[names.index("RetransSegs")])
    assert node.meet("counted")
    return sum(int((node.dir / ("sent%d" % rank)).read_text()) for rank in range(2))


# --- the check -----------------------------------------------------------------------------------------------------

DEVICES, BETWEEN_S = Path("/sys/class/infiniband"), 0.3
DOWN = ("link_downed", "link_error_recovery", "carrier_down_count")  # the link itself
LOST = (  # packets that were damaged, dropped, or not acknowledged in time
    "symbol_error", "port_rcv_errors", "port_xmit_discards", "local_ack_timeout_err", "packet_seq_err",
    "implied_nak_seq_err", "req_transport_retries_exceeded",
    "to_retransmits", "seq_err_naks_rcvd", "max_retry_exceeded",
)  # fmt: skip
AGAIN_SENT = ("local_ack_timeout_err", "to_retransmits")  # of mlx5, of bnxt_re
HINT = ("out_of_sequence", "roce_adp_retrans")  # adaptive routing and slow acknowledgements raise these as well
TRAFFIC = ("port_xmit_data", "port_rcv_data")
FULL = {"link_downed": 255, "link_error_recovery": 255, **dict.fromkeys(LOST[:3], 65535)}  # where small counters stop
PLACES = ("ports/*/counters/*", "ports/*/hw_counters/*", "device/net/*/carrier_down_count")
LINE = re.compile(r"([^/\s]+)/(?:ports/(\d+)/(?:hw_)?counters|device/net/([^/\s]+))/(\w+):(\d{1,20})$")

Counters = Dict[Tuple[str, str], int]  # (device:port, name) to value


def look(root: Path) -> Counters:
    """What can be read now; a counter that cannot is left out."""
    paths = [path for place in PLACES for path in root.glob(f"*/{place}")]
    return parse(f"{path}:{file_text(path)}" for path in paths if path.name in DOWN + LOST + HINT + TRAFFIC)


def parse(lines: Iterable[str]) -> Counters:
    """Of lines as `grep -H .` prints them."""
    found = [LINE.search(line.strip()) for line in lines]
    return {(f"{each[1]}:{each[2] or each[3]}", each[4]): int(each[5]) for each in found if each}


def growth(before: Counters, after: Counters, names: Tuple[str, ...]) -> List[str]:
    grown = [key for key in sorted(after) if key[1] in names and after[key] > before.get(key, after[key])]
    return [f"{port} {name} {before[port, name]} -> {after[port, name]}" for port, name in grown]


def check(params: Mapping[str, Any]) -> Finding:
    """Which error counters of this node's cards grow: now, or since earlier. Totals alone are a hint."""
    root, saved = Path(str(params["root"])), params["earlier"]
    try:
        states = {f"{path.parts[-4]}:{path.parts[-2]}": file_text(path) for path in root.glob("*/ports/*/state")}
        layers = {f"{path.parts[-4]}:{path.parts[-2]}": file_text(path) for path in root.glob("*/ports/*/link_layer")}
        first = look(root)
        time.sleep(BETWEEN_S if first and root == DEVICES else 0)  # a copy does not change
        now = look(root)
    except (OSError, ValueError) as error:
        return unknown(f"{root} cannot be read: {type(error).__name__}")
    if not states:
        return unknown(f"no RDMA port in {root}: none on this node, or none passed into this container")
    evidence = [f"{port} {state or 'state unreadable'}" for port, state in sorted(states.items())[:16]]
    errors = {key: value for key, value in sorted(now.items()) if key[1] in DOWN + LOST}
    if not errors:
        return unknown(*evidence, "no error counter can be read here: a container, a virtual function", advice=ON_HOST)
    live = growth(first, now, (*DOWN, "symbol_error"))
    if live:
        return exposed(*evidence, *live, f"these grew within {BETWEEN_S} s", advice=REPAIR)
    evidence += [f"{line} within {BETWEEN_S} s" for line in growth(first, now, LOST)]
    full = [f"{at} {name} is at its limit" for (at, name), count in errors.items() if count == FULL.get(name)]
    earlier = parse(file_text(str(saved)).splitlines()[:100_000]) if saved else {}
    if not earlier:
        totals = [f"{port} {name} {value}" for (port, name), value in errors.items() if value][:16]
        evidence += totals or ["every error counter that can be read is 0"]
        evidence += ["totals since the driver was loaded: a reboot of node or switch counts as well"] if totals else []
        evidence += [f"no counters in {saved}"] if saved else []
        return unknown(*evidence, *full, "no link fails at this moment; only a later look tells", advice=AGAIN)
    both = [key for key in now if key in earlier]
    lower = [(at, name) for at, name in both if now[at, name] < earlier[at, name]]
    restarted = {at.split(":")[0] for at, name in lower if name in DOWN + TRAFFIC}  # these do not wrap: a reboot
    down = [line for line in growth(earlier, now, DOWN) if line.split(":")[0] not in restarted]
    if down:
        return exposed(*evidence, *down, advice=REPAIR)
    lost = growth(earlier, now, LOST + HINT)
    if lost and not restarted:
        what = "packets were lost or late, and no link of this node went down: another link, a full switch, a dead peer"
        return unknown(*evidence, *lost, what, advice="the drop counters of the switches; the same look on the peers")
    active = [port for port, state in states.items() if state.endswith("ACTIVE")]
    doubts = [f"{at} {name} is lower than before: a reboot or a reset in between" for at, name in lower]
    # a RoCE port need not count in link_downed: the carrier of its interface does
    seen = {at.split(":")[0] for at, name in both if name == "carrier_down_count"}
    seen |= {at for at, name in both if name == "link_downed" and layers.get(at) == "InfiniBand"}
    doubts += [
        f"{port}: no counter of lost links in both looks" for port in active if not {port, port.split(":")[0]} & seen
    ]
    counted = {at for at, name in both if name in AGAIN_SENT}
    doubts += [f"{port}: no counter of packets sent again in both looks" for port in active if port not in counted]
    carried = {line.split()[0] for line in growth(earlier, now, TRAFFIC)}
    doubts += [f"{port} carried nothing in between" for port in active if port not in carried]
    doubts += full if active else ["no port is active"]
    if doubts:
        return unknown(*evidence, *doubts, advice=AGAIN)
    return clear(*evidence, "no error was counted while these ports carried traffic; switches and peers are not seen")


AGAIN = "save the counters with grep as the entry says, and after the next failure --set earlier=FILE"
REPAIR = (
    "unless node or switch was restarted or the port switched off: take the node out, have cable and module examined"
)
ON_HOST = "ask on the host itself"

# --- the experiments -----------------------------------------------------------------------------------------------

CABLE = "two hosts with InfiniBand: two networks of this host and a cable; gloo over TCP and its retries for the cards'"
GAVE_UP = raised(r"Read error \[[\d.]+\]:\d+: (Connection timed out|No route to host|Network is unreachable)")
HICCUP = symptom(r"a step took [1-9]\.\d s where others take 0\.\d s; packets sent again: [1-9]")


def pair(name: str, because: str, fix: str, change: Mapping[str, Any], expect: Expect = GAVE_UP, **common: Any) -> Any:
    """`change` is what the treatment arm does differently."""
    failing, fixed = (partial(run_two_nodes, live=partial(train, **how)) for how in (common, {**common, **change}))
    return Experiment(
        name=name,
        control=Arm(failing, expect, because, "stand-in", CABLE),
        treatment=Arm(fixed, completed(), fix, "stand-in", CABLE),
        world_size=1,
        expected_s=(3.0, 1.5),
    )


UP, STAYS_UP = {"down_s": 0.0}, "the cable stays up"
TOO_LONG = "the cable goes down in mid-run for longer than the transport sends again"
OTHER = "the job uses the other cable, while the same one goes down"
SHORT = "the cable is down for 2.4 s and the transport gives up after 1.4 s"
CUT = "the transport sends again for twice as long, and the cable does not come back"
SURVIVED = "the cable is down for 1.3 s, which the transport survives"

probe = Probe(
    params={
        "root": Param(
            "path",
            "another node's: in /sys/class/infiniband `cp -r --parents */ports */device/net/*/carrier_down_count DIR`",
            str(DEVICES),
        ),
        "earlier": Param("path", "counters of some time before, as grep -H . prints them"),
    },
    check=check,
    experiments=(pair("link", TOO_LONG, STAYS_UP, UP, down_s=FOR_GOOD),),
    variants=(
        pair("other-card", TOO_LONG, OTHER, {"cable": GOOD}, down_s=FOR_GOOD),
        pair("patience", SHORT, "the transport sends again for 25 s", {"retries": 6}, down_s=2.4),
        pair("patience-cut", CUT, "as patient, and the cable stays up", UP, down_s=FOR_GOOD, retries=3),
        pair("hiccup", SURVIVED, STAYS_UP, UP, HICCUP, down_s=1.3, retries=6, slowest_s=1.1),
    ),
)
