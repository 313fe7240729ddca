"""Linux namespaces for the jobs of probes: another /dev/shm, or several nodes on one host, joined by a virtual cable.
A job may also give up privileges of root, which a container does not have.

Runs in the reader's training interpreter: standard library and Python 3.9 only. A change affects this process and the
children that it forks afterwards. After `own_user`, an ordinary user may do all of it if the machine lets users create
namespaces. Anything that is refused raises `Unavailable` with the reason.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, Iterator, List, Optional  # works on Python 3.9

from kb.probe import Context, Symptom, Unavailable

NEW_MOUNTS, NEW_UTS, NEW_USER, NEW_NET = 0x00020000, 0x04000000, 0x10000000, 0x40000000  # from unshare(2)
BIND, RECURSIVE, PRIVATE = 0x1000, 0x4000, 0x40000  # from mount(2)
SET_FLAGS, SET_ADDRESS, SET_NETMASK = 0x8914, 0x8916, 0x891C  # from netdevice(7)
UP_AND_RUNNING = 0x41
DROP_FROM_BOUNDING_SET, CAPABILITY_VERSION = 24, 0x20080522  # from prctl(2) and capget(2)
NEW_LINK, CREATE_AND_ACKNOWLEDGE = 16, 0x605  # from rtnetlink(7): RTM_NEWLINK, and fail if the link exists
LINK_NAME, LINK_INFO, LINK_NET_OF_PID = 3, 18, 19  # attributes of a link
INFO_KIND, INFO_DATA, VETH_PEER = 1, 2, 1  # attributes within LINK_INFO
EXPECTED_FAILURES = {"Symptom": Symptom, "Unavailable": Unavailable}
LINK = b"\0" * 16  # struct ifinfomsg: the attributes alone describe the request


def own_user(number: int = 0) -> None:
    """Become root, or the user with this number, inside a user namespace, with all capabilities there.

    If user namespaces are forbidden, real root continues as root without one. The process must have only one thread:
    call this before anything starts another.
    """
    uid, gid = os.getuid(), os.getgid()
    with _unavailable("no user namespace of its own on this machine"):
        try:
            _call("unshare", NEW_USER)
        except OSError:
            if uid or number:
                raise
            return
        maps = ("uid_map", "%d %d 1" % (number, uid)), ("gid_map", "%d %d 1" % (number, gid))
        for name, line in (("setgroups", "deny"), *maps):
            Path("/proc/self", name).write_text(line)


def drop_capabilities(*capabilities: int) -> None:
    """Give up capabilities below 32, by number, so that neither this process nor what it starts has them again."""
    mask = sum(1 << capability for capability in capabilities)
    for capability in capabilities:
        with suppress(OSError):  # an ordinary user has none to lose
            _call("prctl", DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    with _unavailable("cannot give up privileges of root"):
        _call("capget", header, sets)
        for index in range(3):  # effective, permitted, inheritable; then the same for 32 and above
            sets[index] &= ~mask
        _call("capset", header, sets)


def tmpfs_over(path: str, mib: int) -> None:
    """Mount an empty tmpfs of this size over a folder."""
    _own_mounts()
    with _unavailable("cannot mount a tmpfs"):
        _call("mount", b"tmpfs", os.fsencode(path), b"tmpfs", 0, b"size=%dm" % mib)


def bind_over(source: str, path: str) -> None:
    """Mount one file or folder over another."""
    _own_mounts()
    with _unavailable("cannot mount %s over %s" % (source, path)):
        _call("mount", os.fsencode(source), os.fsencode(path), None, BIND, None)


def own_network(host_name: str = "") -> None:
    """Enter a network with only a loopback interface, which is down, and set a host name if one is given."""
    with _unavailable("no network of its own on this machine"):
        _call("unshare", NEW_NET | (NEW_UTS if host_name else 0))
        if host_name:
            socket.sethostname(host_name)


def lay_cable(end: str, other_end: str, pid: int) -> None:
    """Create a pair of interfaces, one here and one in the network of process `pid`, which may be this one.

    The same as `ip link add <end> type veth peer name <other_end> netns <pid>`.
    """
    peer = LINK + _attribute(LINK_NAME, other_end.encode() + b"\0")
    peer += _attribute(LINK_NET_OF_PID, struct.pack("=I", pid))
    info = _attribute(INFO_KIND, b"veth\0") + _attribute(INFO_DATA, _attribute(VETH_PEER, peer))
    body = LINK + _attribute(LINK_NAME, end.encode() + b"\0") + _attribute(LINK_INFO, info)
    header = struct.pack("=IHHII", 16 + len(body), NEW_LINK, CREATE_AND_ACKNOWLEDGE, 1, 0)
    with _unavailable("no virtual cable between two networks (veth) on this machine"):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as kernel:  # 0: NETLINK_ROUTE
            kernel.send(header + body)
            code = -struct.unpack_from("=i", kernel.recv(4096), 16)[0]
        if code:
            raise OSError(code, os.strerror(code))


def bring_up(interface: str, address: str = "") -> None:
    """Bring an interface up. If an IPv4 address is given, assign it first, in a network of 256 addresses."""
    name = interface.encode().ljust(16, b"\0")
    settings = ((SET_ADDRESS, address), (SET_NETMASK, "255.255.255.0")) if address else ()
    with _unavailable("cannot bring up %s" % interface), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for request, text in settings:
            setting = name + struct.pack("=HH4s8x", socket.AF_INET, 0, socket.inet_aton(text))
            fcntl.ioctl(any_socket, request, setting.ljust(40, b"\0"))
        fcntl.ioctl(any_socket, SET_FLAGS, (name + struct.pack("=H", UP_AND_RUNNING)).ljust(40, b"\0"))


def run_two_nodes(ctx: Context, live: Callable[[Context], None], nodes_s: float = 15.0) -> None:
    """Run `live` as two nodes of one host, in processes that may enter networks of their own.

    `live` gets the context of a job with two ranks and calls its `reached()`. Both processes are killed when one fails
    or both return. Raises what a node raised: `Unavailable`, `Symptom`, or `RuntimeError` for anything else.
    """
    own_user()
    nodes = [Context(rank, 2, ctx.backend, ctx.dir, ctx.params) for rank in range(2)]
    pids = [_start_node(node, live) for node in nodes]
    paths = [ctx.dir / ("node%d.json" % node.rank) for node in nodes]
    results: List[Any] = []
    end = time.monotonic() + nodes_s  # a node that waits for a failed one would wait longer
    while len(results) < 2 and not any(results) and time.monotonic() < end:
        time.sleep(0.01)
        results = [json.loads(path.read_text()) for path in paths if path.exists()]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    failures = [failure for failure in results if failure]
    for kind, _, message in failures:
        if kind in EXPECTED_FAILURES:
            raise EXPECTED_FAILURES[kind](message)
    if failures:
        raise RuntimeError("; ".join("node %d: %s" % (rank, message) for _, rank, message in failures))
    if len(results) < 2:
        raise RuntimeError("a node did not end within %g s" % nodes_s)


def join_nodes(node: Context, interface: str) -> None:
    """Lay a cable between the networks of both nodes, and bring up this node's end under this name."""
    (node.dir / ("pid%d" % node.rank)).write_text(str(os.getpid()))
    if not node.meet("networks made"):
        raise TimeoutError("the other node made no network")
    if node.rank == 0:
        lay_cable(interface, interface, int((node.dir / "pid1").read_text()))
        (node.dir / "cable").touch()
    while not (node.dir / "cable").exists():
        time.sleep(0.005)
    bring_up(interface, "10.83.0.%d" % (node.rank + 1))


def _start_node(node: Context, live: Callable[[Context], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    failure: Optional[List[Any]] = None
    try:
        live(node)
    except BaseException as error:
        failure = [type(error).__name__, node.rank, str(error)]
    try:
        part = node.dir / ("node%d.part" % node.rank)
        part.write_text(json.dumps(failure))
        part.rename(node.dir / ("node%d.json" % node.rank))
    finally:
        os._exit(0)


def _own_mounts() -> None:
    """Enter a private mount namespace; called before every mount, so that no mount affects another process."""
    with _unavailable("no mount namespace of its own on this machine"):
        _call("unshare", NEW_MOUNTS)
    with _unavailable("cannot make the mounts private"):
        _call("mount", b"none", b"/", None, RECURSIVE | PRIVATE, None)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _call(name: str, *arguments: Any) -> None:
    if getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@contextmanager
def _unavailable(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unavailable("%s: %s" % (what, error.strerror or error)) from error
