"""Network interfaces and RDMA ports, without any address."""

from __future__ import annotations

import fcntl
import socket
import struct
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kb.runtime.survey_fields import Reader, read_text

NICS = Path("/sys/class/net")
INFINIBAND = Path("/sys/class/infiniband")
SIOCGIFCONF = 0x8912  # fills a buffer with one `struct ifreq` for each IPv4 address
IFREQ, IFNAMSIZ = 40, 16  # bytes of a `struct ifreq`, and of the name at its beginning


def sources(reader: Reader) -> Mapping[str, Callable[[], Any]]:
    return {"nics": _nics, "infiniband": lambda: _infiniband(reader)}


def _nics() -> dict[str, dict[str, Any]]:
    """The state, MTU and number of addresses of each interface."""
    ipv4, ipv6 = _ipv4_addresses(), _ipv6_addresses()
    return {
        nic.name: {
            "state": read_text(nic / "operstate"),
            "mtu": int(read_text(nic / "mtu")),
            "ipv4_addresses": ipv4[nic.name],
            "ipv6_addresses": ipv6[nic.name],
        }
        for nic in sorted(NICS.iterdir())
        if nic.is_dir()  # bonding puts a file there
    }


def _ipv4_addresses() -> Counter[str]:
    """The number of IPv4 addresses of each interface."""
    answer = array("B", bytes(IFREQ * 1024))
    request = struct.pack("iL", len(answer), answer.buffer_info()[0])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        (size,) = struct.unpack_from("i", fcntl.ioctl(any_socket, SIOCGIFCONF, request))
    names = (answer[start : start + IFNAMSIZ].tobytes().partition(b"\0")[0] for start in range(0, size, IFREQ))
    return Counter(name.decode(errors="replace").partition(":")[0] for name in names)  # eth0:1 is a label of eth0


def _ipv6_addresses() -> Counter[str]:
    path = Path("/proc/net/if_inet6")  # absent if IPv6 is switched off
    return Counter(line.split()[-1] for line in read_text(path).splitlines()) if path.exists() else Counter()


def _infiniband(reader: Reader) -> dict[str, dict[str, Any]]:
    """Every port of every RDMA device, including RoCE (`link_layer` Ethernet); empty if no RDMA driver is loaded."""
    ports = {}
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        name = f"{port.parts[-3]}/{port.name}"
        files = {key: partial(read_text, port / key) for key in ("state", "phys_state", "link_layer", "rate")}
        ports[name] = reader.values(f"network.infiniband.{name}", files)
    return ports
