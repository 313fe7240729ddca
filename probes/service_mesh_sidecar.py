"""A proxy takes the connection between two ranks and does not carry it, as one that a service mesh injects may do."""

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
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

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
SIDECAR = 2  # the rank that trains nothing: the proxy in the pod of rank 1
READY = b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n"


class Proxy:
    """Accepts at a port of its own; `port_behind` is the one that the client means.

    `does` is what follows: it will `hold` the connection, `close` it, or carry it from the client's `first-bytes` on.
    """

    def __init__(self, does: str) -> None:
        self.does, self.port_behind = does, 0
        self.ends: List[socket.socket] = []
        self.listener = socket.create_server((HERE, 0), backlog=64)
        self.port: int = self.listener.getsockname()[1]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        while True:
            client, _ = self.listener.accept()
            self.ends.append(client)
            if self.does == "close":
                client.close()
            elif self.does == "first-bytes":
                threading.Thread(target=self.carry, args=(client,), daemon=True).start()

    def carry(self, client: socket.socket) -> None:
        with suppress(OSError):
            client.recv(1, socket.MSG_PEEK)
            server = self.connect()
            self.ends.append(server)
            threading.Thread(target=pump, args=(server, client), daemon=True).start()
            pump(client, server)

    def connect(self) -> socket.socket:
        """Rank 0 may not listen yet, and the client is accepted already."""
        end = time.monotonic() + 20
        while True:
            try:
                return socket.create_connection((HERE, self.port_behind))
            except OSError:
                if time.monotonic() > end:
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


def start(ctx: Context, *, through: str, host_s: float = 2, client_s: float = 60, speaks_first: str = "client") -> None:
    """Ranks 0 and 1 meet at rank 0's port. With `through` rank 1 reaches that port by its proxy, else directly."""
    if ctx.rank < SIDECAR:
        import torch  # noqa: F401  # before the mark: its import takes a while on a busy machine
    proxy = Proxy(through) if ctx.rank == SIDECAR else None
    if proxy:
        write(ctx, "proxy", proxy.port)
        proxy.port_behind = read(ctx, "port")
    port = free_port(ctx) if ctx.rank == 0 else read(ctx, "proxy" if through else "port")
    ctx.reached()
    if not proxy and speaks_first == "server":
        greet(ctx, port)
    elif not proxy:
        join(ctx.rank, port, client_s if ctx.rank else host_s)
    assert ctx.meet("started", timeout_s=60)  # a proxy stays as long as its job


def join(rank: int, port: int, timeout_s: float) -> None:
    import torch
    import torch.distributed as dist

    patience = timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", f"tcp://{HERE}:{port}", patience, 2, rank)
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 2


def greet(ctx: Context, port: int) -> None:
    """A service whose server says the first word, as that of a data base does."""
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
                raise Symptom(f"connected, and no first word of the server within {waited:.1f} s") from error


def connect_pairs(ctx: Context, *, through: str) -> None:
    """The store is reached directly. The ports that gloo's pairs listen at are the kernel's choice, as NCCL's are."""
    import torch
    import torch.distributed as dist

    proxies: List[Proxy] = []

    def redirected(address: Any) -> bytes:
        proxy = Proxy(through)
        proxy.port_behind = int.from_bytes(address.group(1), "big")
        proxies.append(proxy)
        return b"\x02\x00" + proxy.port.to_bytes(2, "big") + bytes(address.group(2))

    class Store(dist.Store):  # type: ignore[misc]
        """What the rules of a pod do to a connection: the address is right, and at it the proxy answers."""

        def get(self, key: str) -> bytes:
            address = rb"\x02\x00(..)(\x7f\x00\x00\x01)"  # of socket.h: family, port, 127.0.0.1
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
    assert ctx.meet("joined")  # one end of a pair believes itself connected before the other end is
    total = torch.ones(1)
    dist.all_reduce(total)
    ctx.note(connections=sum(len(proxy.ends) for proxy in proxies))
    assert total.item() == 2
    ctx.meet("started")


def download(ctx: Context, *, wait: bool) -> None:
    """A program with one request, which its own proxy has to carry, and which starts a second before that."""
    server = socket.socket()
    server.bind((HERE, 0))  # the port is taken, and refuses until something listens
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

# Ports that must all listen in the network of this pod.
MESHES = {
    "Istio's sidecar, or ztunnel of its ambient mode": (15001, 15006),
    "Linkerd's sidecar": (4140, 4143),
    "Consul's sidecar": (15001, 20000),
}
TABLES = ("/proc/self/net/tcp", "/proc/self/net/tcp6")


def check(params: Mapping[str, Any]) -> Finding:
    """Whether a proxy of a service mesh listens in the network of this process, which it shares with its pod."""
    several = spans_nodes(params["nodes"])
    listening = ports()
    if listening is None:
        return unknown(f"{TABLES[0]} cannot be read here")
    found = [
        f"{mesh} listens at {' and '.join(map(str, numbers))}"
        for mesh, numbers in MESHES.items()
        if listening.keys() >= set(numbers)
    ]
    if found and several:
        return exposed(*found, "the job spans pods", advice="no sidecar: see Fix 1; Fix 2 and 3 cannot be seen here")
    if found:
        return unknown(*found, "whether the job spans pods, and which ports are left to it, cannot be seen from here")
    here = "no proxy of Istio, Linkerd or Consul listens in this network"
    if several is False:
        return clear(here, "the job stays in this pod")
    return unknown(here, "whether the other pods have one, or the nodes, cannot be seen from here")


def ports() -> Optional[Dict[int, str]]:
    """Port to the number of the user that listens at it; None where the kernel's table cannot be read."""
    found: Dict[int, str] = {}
    if not file_text(TABLES[0]):
        return None
    for line in "\n".join(file_text(table) for table in TABLES).splitlines():
        words = line.split()
        if len(words) > 7 and words[3] == "0A":  # TCP_LISTEN
            with suppress(ValueError):
                found[int(words[1].rpartition(":")[2], 16)] = words[7]
    return found


# --- the experiments -----------------------------------------------------------------------------------------------

PROXY = "a sidecar of Istio: a plain TCP proxy before rank 0's port, at a port of its own instead of by iptables"
CLOSED = r"(Connection reset by peer|Broken pipe|[Ff]ailed to recv, got 0 bytes|Connection was likely closed)"
PAIR_RESET = r"Read error \[.{1,60}\]\S*: Connection reset by peer"
ABORTED = r"getpeername: Transport endpoint is not connected"  # gloo of torch 2.2
PAIR_CLOSED = rf"(pair\.(cc|h):\d+\] ({PAIR_RESET}|Connection closed by peer|Connect timeout)|{ABORTED})"
TORCH = {"torch": ">=2.2"}
DIRECT = "rank 1 connects to rank 0 itself, as a pod without a sidecar does"


def pair(
    name: str,
    broken: Callable[[Context], None],
    fixed: Callable[[Context], None],
    texts: Tuple[Expect, str, str],
    packages: Mapping[str, str] = TORCH,
    world_size: int = 3,
    deadline_s: float = 30,
) -> Experiment:
    """`texts` are how the control arm ends, and what each arm does."""
    expect, because, fix = texts
    like: Dict[str, Any] = {"fidelity": "stand-in", "stands_for": PROXY}
    return Experiment(
        name,
        control=Arm(broken, expect, because=because, **like),
        treatment=Arm(fixed, completed(), because=fix, **like),
        world_size=world_size,
        needs=Needs(packages=packages),
        deadline_s=deadline_s,
        expected_s=(4.0, 0.6),
    )


ONE_OF_TWO = r"Timed out after \d+ seconds waiting for clients\. 1/2 clients joined"

probe = Probe(
    params={"nodes": Param("int", "how many pods the job has; 0: as the launcher's variables say", 0)},
    check=check,
    experiments=(
        pair(
            "held",
            partial(start, through="hold"),
            partial(start, through="", host_s=20),
            (raised(ONE_OF_TWO), "the proxy accepts the connection of rank 1 and leaves it there", DIRECT),
        ),
    ),
    variants=(
        pair(
            "no-timeout",
            partial(start, through="hold", host_s=60, client_s=1),
            partial(start, through="", host_s=20, client_s=20),
            (
                hung("init_process_group"),
                "the proxy holds the connection, and rank 1, with a timeout of one second, waits on after twelve",
                DIRECT,
            ),
            deadline_s=12,
        ),
        pair(
            "closed",
            partial(start, through="close", host_s=30, client_s=3),
            partial(start, through="", host_s=20, client_s=20),
            (raised(CLOSED), "the proxy accepts and closes, as where it refuses plain text, or has no way on", DIRECT),
        ),
        pair(
            "other-ports",
            partial(connect_pairs, through="close"),
            partial(connect_pairs, through=""),
            (
                raised(PAIR_CLOSED),
                "the port of the store is left out of the mesh, those of gloo's pairs are not",
                "all ports are left out of the mesh",
            ),
            world_size=2,
        ),
        pair(
            "first-bytes",
            partial(start, through="first-bytes", host_s=20, client_s=20, speaks_first="server"),
            partial(start, through="first-bytes", host_s=20, client_s=20, speaks_first="client"),
            (
                symptom("connected, and no first word of the server"),
                "the proxy connects on after the client's first bytes, and the server has the first word",
                "the same proxy: the clients of torch's store and of gloo speak first",
            ),
        ),
        pair(
            "not-ready",
            partial(download, wait=False),
            partial(download, wait=True),
            (
                symptom("the only request failed .*Connection refused"),
                "the program asks once, before its proxy listens",
                "it asks the proxy whether it is ready, until it is",
            ),
            packages={},
            world_size=1,
        ),
    ),
)
