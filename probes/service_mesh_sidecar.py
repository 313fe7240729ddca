"""A proxy accepts the connection between two ranks and does not forward it, as a service mesh's sidecar may do."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
import urllib.request
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, List, Mapping, Optional, Set, Tuple

from kb.host import file_text
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
    hung,
    raised,
    symptom,
    unknown,
)
from kb.training_config import spans_nodes

HERE = "127.0.0.1"
SIDECAR = 2  # this rank does not train: it is the proxy in the pod of rank 1
READY = b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"


class Proxy:
    """Accepts connections on its own port, in place of the server on `port_behind`.

    Its `behaviour` is to `hold` a connection, to `close` it, to forward it after the client's `first-bytes`, or to
    forward it `if-listening`, and to close it if rank 0 does not listen yet.
    """

    def __init__(self, behaviour: str) -> None:
        self.behaviour, self.port_behind = behaviour, 0
        self.ends: List[socket.socket] = []
        self.listener = socket.create_server((HERE, 0), backlog=64)
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            client, _ = self.listener.accept()
            self.ends.append(client)
            if self.behaviour == "close":
                client.close()
            elif self.behaviour != "hold":
                threading.Thread(target=self.forward, args=(client,), daemon=True).start()

    def forward(self, client: socket.socket) -> None:
        try:
            if self.behaviour == "first-bytes":
                client.recv(1, socket.MSG_PEEK)
            server = self.connect()
        except OSError:
            client.close()
            return
        self.ends.append(server)
        threading.Thread(target=pump, args=(server, client), daemon=True).start()
        pump(client, server)

    def connect(self) -> socket.socket:
        """Retries unless it forwards `if-listening`: it accepts a client even if rank 0 does not listen yet."""
        end = time.monotonic() + 20
        while True:
            try:
                return socket.create_connection((HERE, self.port_behind))
            except OSError:
                if self.behaviour == "if-listening" or time.monotonic() > end:
                    raise
                time.sleep(0.02)


def pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while True:
            data = source.recv(65536)
            if not data:
                break
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def start(
    ctx: Context,
    *,
    through: str,
    host_s: float = 2,
    client_s: float = 60,
    speaks_first: str = "client",
    late_s: float = 0,
) -> None:
    """Ranks 0 and 1 meet at rank 0's port. With `through`, rank 1 connects to the proxy instead of that port."""
    if ctx.rank < SIDECAR:
        import torch  # noqa: F401  # the import is slow on a busy machine, so it comes before ctx.reached()
    proxy = Proxy(through) if ctx.rank == SIDECAR else None
    if proxy:
        write(ctx, "proxy", proxy.port)
        proxy.port_behind = read(ctx, "port")
    port = free_port(ctx) if ctx.rank == 0 else read(ctx, "proxy" if through else "port")
    ctx.reached()
    if ctx.rank == 0:
        time.sleep(late_s)
    if not proxy and speaks_first == "server":
        greet(ctx, port)
    elif not proxy:
        join(ctx.rank, port, client_s if ctx.rank else host_s)
    assert ctx.meet("started", timeout_s=60)  # the proxy stays until the job has ended


def join(rank: int, port: int, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", f"tcp://{HERE}:{port}", timedelta(seconds=timeout_s), 2, rank)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


def greet(ctx: Context, port: int) -> None:
    """A service whose server sends the first bytes, as a database does."""
    if ctx.rank == 0:
        with socket.create_server((HERE, port)) as server:
            write(ctx, "greeting", port)
            server.settimeout(30)
            server.accept()[0].sendall(b"hello")
    else:
        read(ctx, "greeting")
        begin = time.monotonic()
        with socket.create_connection((HERE, port), timeout=2) as client:
            try:
                assert client.recv(5) == b"hello"
            except socket.timeout as error:
                waited = time.monotonic() - begin
                raise Symptom(f"connected, but the server sent nothing within {waited:.1f} s") from error


def connect_pairs(ctx: Context, *, through: str) -> None:
    """The ranks reach the store directly; gloo's pairs, on ports that the kernel chooses, connect `through` a proxy."""
    import torch
    import torch.distributed as dist

    proxies: List[Proxy] = []

    def redirected(address: Any) -> bytes:
        proxy = Proxy(through)
        proxy.port_behind = int.from_bytes(address.group(1), "big")
        proxies.append(proxy)
        return b"\x02\x00" + proxy.port.to_bytes(2, "big") + bytes(address.group(2))

    class Store(dist.Store):  # type: ignore[misc]
        """Puts a proxy's port into each address, as the rules of a pod redirect a connection to its proxy."""

        def get(self, key: str) -> bytes:
            address = rb"\x02\x00(..)(\x7f\x00\x00\x01)"  # a sockaddr_in: family, port, 127.0.0.1
            value = store.get(key)
            return re.sub(address, redirected, value, flags=re.DOTALL) if through else value

        def set(self, key: str, value: Any) -> None:
            store.set(key, value)

        def add(self, key: str, number: int) -> int:
            return int(store.add(key, number))

        def check(self, keys: List[str]) -> bool:
            return bool(store.check(keys))

        def wait(self, keys: List[str], timeout: Any = timedelta(seconds=20)) -> None:
            store.wait(keys, timeout)

    port = free_port(ctx) if ctx.rank == 0 else read(ctx, "port")
    store = dist.TCPStore(HERE, port, 2, ctx.rank == 0, timedelta(seconds=20))
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group = Store()
    ctx.reached()
    dist.init_process_group("gloo", store=group, rank=ctx.rank, world_size=2, timeout=timedelta(seconds=3))
    assert ctx.meet("joined")  # one end of a pair may be connected before the other end is
    total = torch.ones(1)
    dist.all_reduce(total)
    ctx.note(connections=sum(len(proxy.ends) for proxy in proxies))
    assert total.item() == 2
    ctx.meet("started")


def download(ctx: Context, *, wait: bool) -> None:
    """A program sends one request through its proxy, which begins to listen a second later; or it waits for it."""
    server = socket.socket()
    server.bind((HERE, 0))  # the port refuses connections until something listens
    port = server.getsockname()[1]
    ctx.reached()
    threading.Thread(target=become_ready, args=(server,), daemon=True).start()
    begin = time.monotonic()
    while True:
        try:
            assert urllib.request.urlopen(f"http://{HERE}:{port}/healthz/ready", timeout=5).status == 200
            return
        except OSError as error:
            took = time.monotonic() - begin
            if not wait or took > 20:
                raise Symptom(f"the only request failed after {took:.2f} s: {error}") from error
            time.sleep(0.1)


def become_ready(server: socket.socket) -> None:
    time.sleep(1)
    server.listen()
    while True:
        client, _ = server.accept()
        with suppress(OSError), client:
            client.recv(4096)
            client.sendall(READY)


def free_port(ctx: Context) -> int:
    with socket.create_server((HERE, 0)) as free:
        port: int = free.getsockname()[1]
    write(ctx, "port", port)
    return port


def write(ctx: Context, name: str, port: int) -> None:
    part = Path(ctx.path(f"{name}.part"))
    part.write_text(str(port))
    part.rename(ctx.path(name))


def read(ctx: Context, name: str) -> int:
    while not Path(ctx.path(name)).exists():
        time.sleep(0.005)
    return int(Path(ctx.path(name)).read_text())


# --- the check -----------------------------------------------------------------------------------------------------

# A mesh's proxy is in this pod if all of its ports listen in the pod's network.
MESHES = {
    "Istio's sidecar, or ztunnel of its ambient mode": (15001, 15006),
    "Linkerd's sidecar": (4140, 4143),
    "Consul's sidecar": (15001, 20000),
}
TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def check(params: Mapping[str, Any]) -> Finding:
    """Does a proxy of a service mesh listen in this pod's network, which this process shares?"""
    spans_pods = spans_nodes(params["nodes"])
    listening = listening_ports()
    if listening is None:
        return unknown(f"kb cannot read {TABLES[0]}")
    proxies = [
        f"{mesh} listens on ports {' and '.join(map(str, numbers))}"
        for mesh, numbers in MESHES.items()
        if listening >= set(numbers)
    ]
    if proxies and spans_pods:
        advice = "remove the sidecar, see Fix 1; ignore this if Fix 2 or 3 is in place, which kb cannot see from here"
        return exposed(*proxies, "the job spans several pods", advice=advice)
    if proxies:
        return unknown(
            *proxies, "kb cannot see whether the job spans several pods, nor which ports the proxy leaves out"
        )
    no_proxy = "no proxy of Istio, Linkerd or Consul listens in this pod's network"
    if spans_pods is False:
        return clear(no_proxy, "the job runs in this pod only")
    return unknown(no_proxy, "kb cannot see from here whether the other pods or the nodes have a proxy")


def listening_ports() -> Optional[Set[int]]:
    """The TCP ports on which a process listens in this network; None if the kernel's table cannot be read."""
    ports: Set[int] = set()
    if not file_text(TABLES[0]):
        return None
    for line in "\n".join(file_text(table) for table in TABLES).splitlines():
        words = line.split()
        if len(words) > 7 and words[3] == "0A":  # TCP_LISTEN
            with suppress(ValueError):
                ports.add(int(words[1].rpartition(":")[2], 16))
    return ports


# --- the experiments -----------------------------------------------------------------------------------------------

PROXY = "a sidecar of Istio; here rank 1 connects to a plain TCP proxy, without iptables rules"
CLOSED = r"(Connection reset by peer|Broken pipe|[Ff]ailed to recv, got 0 bytes|Connection was likely closed)"
PAIR_RESET = r"Read error \[.{1,60}\]\S*: Connection reset by peer"
ABORTED = r"getpeername: Transport endpoint is not connected"  # gloo of torch 2.2
PAIR_CLOSED = rf"(pair\.(cc|h):\d+\] ({PAIR_RESET}|Connection closed by peer|Connect timeout)|{ABORTED})"
TORCH = {"torch": ">=2.2"}
DIRECT = "rank 1 connects directly to rank 0, as it does in a pod without a sidecar"


def pair(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    texts: Tuple[Expect, str, str],
    packages: Mapping[str, str] = TORCH,
    world_size: int = 3,
    deadline_s: float = 30,
) -> Experiment:
    """`texts` holds how the control arm ends, and what the control and the treatment arm do."""
    expect, because, fix = texts
    fidelity: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": PROXY}
    return Experiment(
        name,
        control=Arm(broken, expect, because=because, **fidelity),
        treatment=Arm(fixed, completed(), because=fix, **fidelity),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=deadline_s,
        expected_s=(4.0, 0.6),
    )


ONE_OF_TWO = r"Timed out after \d+ seconds waiting for clients\. 1/2 clients joined"

probe = Probe(
    params={"nodes": Param("int", "number of pods of the job; 0 takes it from the launcher's variables", 0)},
    check=check,
    experiments=(
        pair(
            "held",
            partial(start, through="hold"),
            partial(start, through="", host_s=20),
            (raised(ONE_OF_TWO), "the proxy accepts rank 1's connection and never forwards it to rank 0", DIRECT),
        ),
    ),
    variants=(
        pair(
            "no-timeout",
            partial(start, through="hold", host_s=60, client_s=1),
            partial(start, through="", host_s=20, client_s=20),
            (
                hung("init_process_group"),
                "the proxy never forwards the connection, and rank 1 still waits after 12 s despite a timeout of 1 s",
                DIRECT,
            ),
            deadline_s=12,
        ),
        pair(
            "closed",
            partial(start, through="close", host_s=30, client_s=3),
            partial(start, through="", host_s=20, client_s=20),
            (
                raised(CLOSED),
                "the proxy accepts and closes the connection, as it does if it rejects plaintext or has no route",
                DIRECT,
            ),
        ),
        pair(
            "late-host",
            partial(start, through="if-listening", host_s=20, client_s=20, late_s=2),
            partial(start, through="", host_s=20, client_s=20, late_s=2),
            (
                raised(CLOSED),
                "rank 0 listens two seconds later; until then the proxy closes what it accepted, and torch gives up",
                "the connection is refused until rank 0 listens, and torch tries again",
            ),
            packages={"torch": ">=2.2,<2.5"},
        ),
        pair(
            "other-ports",
            partial(connect_pairs, through="close"),
            partial(connect_pairs, through=""),
            (
                raised(PAIR_CLOSED),
                "the mesh excludes the store's port but not the ports of gloo's pairs, whose connections it closes",
                "the mesh excludes all ports",
            ),
            world_size=2,
        ),
        pair(
            "first-bytes",
            partial(start, through="first-bytes", host_s=20, client_s=20, speaks_first="server"),
            partial(start, through="first-bytes", host_s=20, client_s=20, speaks_first="client"),
            (
                symptom("connected, but the server sent nothing"),
                "the proxy waits for the client's first bytes, but in this protocol the server sends first",
                "the same proxy forwards torch's store and gloo, whose clients send first",
            ),
        ),
        pair(
            "not-ready",
            partial(download, wait=False),
            partial(download, wait=True),
            (
                symptom("the only request failed .*Connection refused"),
                "the program sends its only request before its proxy listens",
                "the program asks the proxy until it is ready",
            ),
            packages={},
            world_size=1,
        ),
    ),
)
