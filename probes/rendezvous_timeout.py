"""One rank connects to a port on which no store listens, so the store of rank 0 waits for it until the timeout."""

import ipaddress
import os
import socket
import subprocess
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

from kb.namespaces import bind_over, own_user
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
    completed,
    exposed,
    raised,
    unknown,
)
from kb.training_config import spans_nodes

TIMEOUT_S = 3  # no shorter, because starting a store on loopback can take seconds on a loaded machine
MASTER = "trainer-head-0"
PATIENCE_S = 0.3  # shorter than the second after which TCP resends a lost packet


def meet_at_the_store(ctx: Context, *, same_endpoint: bool) -> None:
    """Rank 0 hosts the store, as with `env://`; rank 1 connects to the same port, or to another reserved one."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))  # rank 1 does not listen on its port, which then refuses, and no one else can
    port = listener.getsockname()[1]
    endpoint = Path(ctx.path("endpoint"))
    options: Dict[str, Any] = {}
    if ctx.rank == 0:
        listener.listen()
        endpoint.write_text(str(port))
        options.update(
            master_listen_fd=listener.detach(), use_libuv=False
        )  # older libuv stores do not accept a file descriptor
    ctx.reached()
    if same_endpoint:
        port = int(endpoint.read_text())
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, ctx.world_size, is_master=ctx.rank == 0, timeout=timeout, **options)
    store.set(f"from {ctx.rank}", "here")
    assert [store.get(f"from {rank}") for rank in range(ctx.world_size)] == [b"here"] * ctx.world_size
    ctx.meet("read")  # the host of the store ends last


def count_processes(ctx: Context, *, as_started: bool) -> None:
    """WORLD_SIZE is the number of running processes, or one more."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    endpoint = Path(ctx.path("endpoint"))
    world_size = ctx.world_size if as_started else ctx.world_size + 1
    timeout = timedelta(seconds=TIMEOUT_S)
    ctx.reached()
    if ctx.rank == 0:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        endpoint.write_text(str(port))
        options = {"master_listen_fd": listener.detach(), "use_libuv": False}
        assert ctx.meet("listening")
        TCPStore("127.0.0.1", port, world_size, is_master=True, timeout=timeout, **options)
    else:
        assert ctx.meet("listening")
        port = int(endpoint.read_text())
        TCPStore("127.0.0.1", port, world_size, is_master=False, timeout=timeout)
    ctx.meet("met", timeout_s=12)


def join_c10d(ctx: Context, *, first_is_host: bool) -> None:
    """Two nodes run the code of torchrun for `--rdzv-backend c10d`. No node takes 0.0.0.0 for its own address."""
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    try:
        socket.getaddrinfo(socket.gethostname(), None)  # torchrun resolves it too
    except OSError as error:
        raise Unavailable(f"the name of this host does not resolve: {error}") from error
    port = Path(ctx.path("endpoint"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as any_port:
            port.write_text(str(any_port.getsockname()[1]))
    ctx.reached()
    configuration: Dict[str, Any] = {"read_timeout": TIMEOUT_S}
    if first_is_host:
        configuration["is_host"] = str(int(ctx.rank == 0))
    endpoint = f"0.0.0.0:{port.read_text()}"
    backend, _ = c10d.create_backend(RendezvousParameters("c10d", endpoint, "job", 2, 2, **configuration))
    if ctx.rank == 0:
        backend.set_state(b"from node 0")
    assert ctx.meet("set")
    state = backend.get_state()
    assert state is not None and state[0] == b"from node 0", state
    ctx.meet("read")


def join_under_torchrun(ctx: Context, *, from_environment: bool) -> None:
    """torchrun's agent (here in rank 0) names its store in the environment; the program may use its own address."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    agent_port, unused_port = Path(ctx.path("endpoint")), Path(ctx.path("unused"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as any_port:
            unused_port.write_text(str(any_port.getsockname()[1]))
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        agent_port.write_text(str(agent.port))
    ctx.reached()
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": agent_port.read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    names["TORCHELASTIC_RESTART_COUNT"] = "0"  # torch 2.2 reads it
    os.environ.update(names, RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size))
    if from_environment:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        url = f"tcp://127.0.0.1:{unused_port.read_text()}"
        dist.init_process_group("gloo", init_method=url, rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)
    dist.barrier()
    ctx.meet("met")


def resolve_master(ctx: Context, *, listed: bool) -> None:
    """Rank 1 connects to the master by name; with `listed`, its /etc/hosts contains that name."""
    port = Path(ctx.path("endpoint"))
    if ctx.rank == 1:
        own_user()  # before torch starts a thread
        hosts = Path(ctx.path("hosts"))
        hosts.write_text("127.0.0.1 localhost\n" + f"127.0.0.1 {MASTER}\n" * listed)
        bind_over(str(hosts), "/etc/hosts")
    from datetime import timedelta

    from torch.distributed import TCPStore

    timeout = timedelta(seconds=TIMEOUT_S)
    options = {"timeout": timeout, "wait_for_workers": False}
    if ctx.rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, **options)
        store.set("from 0", "here")
        port.write_text(str(store.port))
    ctx.reached()
    if ctx.rank == 1:
        assert TCPStore(MASTER, int(port.read_text()), is_master=False, **options).get("from 0") == b"here"
    ctx.meet("read")


def check(params: Mapping[str, Any]) -> Finding:
    """Does the name of the master resolve on this machine, and does its port accept a connection? Sends no data."""
    address, port = params["address"], params["port"]
    if not address:
        return unknown(
            "no address was named",
            advice="run this on every node while rank 0 waits: --set address=MASTER_ADDR --set port=29500",
        )
    try:
        command = ["getent", "ahosts", address]
        lookup = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=0.5)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return unknown(f"kb could not look up {address!r}: {error}")
    items = list(dict.fromkeys(line.split()[0] for line in lookup.stdout.splitlines() if line.strip()))
    if not items and lookup.returncode != 2:  # 2 means that there is no such name
        return unknown(f"getent could not look up {address}: exit status {lookup.returncode}")
    if not items:
        return exposed(
            f"{address} does not resolve here",
            advice="add the name to DNS or to /etc/hosts on this node, or set MASTER_ADDR to an IP address",
        )
    answers = {ip: answer(ip, port) for ip in items[:2]}
    evidence = [f"{address} is {ip}, port {port}: {result}" for ip, result in answers.items()]
    if any(ipaddress.ip_address(ip.split("%")[0]).is_loopback for ip in items):
        return judge_loopback(evidence, address, spans_nodes(params["nodes"]))
    if "accepted" in answers.values():
        return unknown(*evidence, "something listens there, but kb cannot tell whether it is the store of your job")
    if "timed out" in answers.values():
        message = f"no answer within {PATIENCE_S} s: a packet filter, a wrong route or address, or one lost packet"
        advice = f'run here and on the host of rank 0: timeout 5 bash -c "</dev/tcp/{address}/{port}" && echo reached'
        return unknown(*evidence, message, advice=advice)
    return unknown(
        *evidence, advice="if the port refused, nothing listens there now: check that rank 0 runs and uses this port"
    )


def judge_loopback(evidence: List[str], address: str, several: Optional[bool]) -> Finding:
    message = "a loopback address means a different host on each node"
    if address in (socket.gethostname(), socket.getfqdn()) and not address.startswith("localhost"):
        return unknown(
            *evidence, "it is the name of this host, so it is fine here", advice="run this on the other nodes"
        )
    if several:
        return exposed(
            *evidence, message, advice="set MASTER_ADDR to the name or address of the first node, on every node"
        )
    if several is None:
        return unknown(*evidence, f"{message}: it is fine for one node, wrong for several", advice="--set nodes=N")
    return unknown(*evidence, "this is fine for one node; kb cannot tell whether it is the store of your job")


def answer(ip: str, port: int) -> str:
    try:
        socket.create_connection((ip, port), timeout=PATIENCE_S).close()
        return "accepted"
    except socket.timeout:
        return "timed out"
    except (OSError, OverflowError) as error:
        return str(error)


WRONG_PORT = "rank 1 connects to a different port than the one on which the store of rank 0 listens"
SAME_PORT = "both ranks use the same endpoint, and each reads the key of the other"
UNCONNECTED = r"client socket has (timed out after \d+m?s|failed to connect)"


def experiment(
    name: str,
    job: Callable[..., None],
    fix: str,
    expect: Expect,
    because: Tuple[str, str],
    torch: str = ">=2.1",
    env: Mapping[str, str] = MappingProxyType({}),
) -> Experiment:
    """`fix` is the argument that differs; `because` says what the control and the treatment arm do."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=expect, because=because[0], fidelity="cpu", env=env),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu", env=env),
        needs=Needs(packages={"torch": torch}),
        deadline_s=30,
        settle_s=4 if name == "store" else 1,  # long enough to see both ranks fail
        expected_s=(4.5, 0.1),
    )


probe = Probe(
    params={
        "address": Param("str", "MASTER_ADDR or rendezvous host to which the check connects"),
        "port": Param("int", "port of that host", 29500),
        "nodes": Param("int", "number of nodes of the job; 0 means that the launcher's variables decide", 0),
    },
    check=check,
    experiments=(
        experiment(
            "store",
            meet_at_the_store,
            "same_endpoint",
            raised(rf"waiting for (clients|workers)\. 1/2 |{UNCONNECTED}"),
            (WRONG_PORT, SAME_PORT),
            ">=2.2",  # older releases do not report missing clients on the host
        ),
    ),
    variants=(
        experiment(
            "missing-rank",
            count_processes,
            "as_started",
            raised(r"waiting for (clients|workers)\. 2/3 "),
            ("WORLD_SIZE is 3, but only two processes run", "WORLD_SIZE is 2, and two processes run"),
            ">=2.2",
            {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"},  # settings that do not help
        ),
        experiment(
            "nobody-hosts",
            join_c10d,
            "first_is_host",
            raised(r"The connection to the C10d store has failed"),
            (
                "no node takes the endpoint for its own address, so both are clients and none hosts the store",
                "is_host=1 makes the first node host the store; the other node has is_host=0",
            ),
        ),
        experiment(
            "tcp-url",
            join_under_torchrun,
            "from_environment",
            raised(UNCONNECTED),
            (
                "the program uses a tcp:// address, on which nothing listens under torchrun",
                "env:// uses the store of torchrun's agent",
            ),
            ">=2.1,<2.14",  # since 2.14, rank 0 hosts a store at an address that is not the agent's
        ),
        experiment(
            "hosts-file",
            resolve_master,
            "listed",
            raised(rf"cannot be retrieved \(gai error|any network address of|{UNCONNECTED}"),
            (
                "the name of the master does not resolve on the other node",
                "/etc/hosts of the other node contains the name",
            ),
        ),
    ),
)
