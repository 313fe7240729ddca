"""One rank connects to a port where no store listens, so rank 0's store waits for it in vain."""

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

TIMEOUT_S = 3  # not less: the start of a store on loopback stalled for seconds on a loaded machine
MASTER = "trainer-head-0"
PATIENCE_S = 0.3  # less than the second after which a lost packet is sent again


def meet_at_the_store(ctx: Context, *, same_endpoint: bool) -> None:
    """Rank 0 hosts the store, as under `env://`; rank 1 was told the same port, or another one that the probe holds."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    mine = socket.socket()
    mine.bind(("127.0.0.1", 0))  # rank 1 never listens on its own: it refuses, and nobody else can listen there
    port = mine.getsockname()[1]
    endpoint = Path(ctx.path("endpoint"))
    options: Dict[str, Any] = {}
    if ctx.rank == 0:
        mine.listen()
        endpoint.write_text(str(port))
        options.update(master_listen_fd=mine.detach(), use_libuv=False)  # older libuv stores take none
    ctx.reached()
    if same_endpoint:
        port = int(endpoint.read_text())
    timeout = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, ctx.world_size, is_master=ctx.rank == 0, timeout=timeout, **options)
    store.set(f"from {ctx.rank}", "here")
    assert [store.get(f"from {rank}") for rank in range(ctx.world_size)] == [b"here"] * ctx.world_size
    ctx.meet("read")  # the host of the store leaves last


def count_processes(ctx: Context, *, as_started: bool) -> None:
    """WORLD_SIZE counts the processes that were started, or one more."""
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
    """Two nodes with torchrun's own code for `--rdzv-backend c10d`. No node takes 0.0.0.0 for its own address."""
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    try:
        socket.getaddrinfo(socket.gethostname(), None)  # torchrun asks for it as well
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
    """The agent (here in rank 0's process) hosts a store and names it in the environment; the program has its own."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(seconds=TIMEOUT_S)
    port, own = Path(ctx.path("endpoint")), Path(ctx.path("own"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as any_port:
            own.write_text(str(any_port.getsockname()[1]))
        agent = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        port.write_text(str(agent.port))
    ctx.reached()
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port.read_text(), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    names["TORCHELASTIC_RESTART_COUNT"] = "0"  # torch 2.2 reads it
    os.environ.update(names, RANK=str(ctx.rank), WORLD_SIZE=str(ctx.world_size))
    if from_environment:
        dist.init_process_group("gloo", timeout=timeout)
    else:
        url = f"tcp://127.0.0.1:{own.read_text()}"
        dist.init_process_group("gloo", init_method=url, rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)
    dist.barrier()
    ctx.meet("met")


def resolve_master(ctx: Context, *, listed: bool) -> None:
    """Rank 1 knows the master by name. Its /etc/hosts lists that name, or not."""
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
    """From this machine: does the master's name resolve, and does its port accept a connection? Sends no byte."""
    address, port = params["address"], params["port"]
    if not address:
        return unknown(
            "no address was named",
            advice="on every node while rank 0 waits: --set address=MASTER_ADDR --set port=29500",
        )
    try:
        command = ["getent", "ahosts", address]
        looked_up = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, timeout=0.5)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        return unknown(f"could not look up {address!r}: {error}")
    items = list(dict.fromkeys(line.split()[0] for line in looked_up.stdout.splitlines() if line.strip()))
    if not items and looked_up.returncode != 2:  # 2: there is no such name
        return unknown(f"getent could not look up {address}: exit status {looked_up.returncode}")
    if not items:
        return exposed(f"{address} does not resolve here", advice="DNS or /etc/hosts of this node, or MASTER_ADDR=<IP>")
    answers = {ip: answer(ip, port) for ip in items[:2]}
    evidence = [f"{address} is {ip}, port {port}: {what}" for ip, what in answers.items()]
    if any(ipaddress.ip_address(ip.split("%")[0]).is_loopback for ip in items):
        return judge_loopback(evidence, address, spans_nodes(params["nodes"]))
    if "accepted" in answers.values():
        return unknown(*evidence, "the way there is open; that it is the store of your job cannot be seen from here")
    if "timed out" in answers.values():
        late = f"no answer within {PATIENCE_S} s: a packet filter, a wrong route or address, or one lost packet"
        longer = f'timeout 5 bash -c "</dev/tcp/{address}/{port}" && echo reached, here and on rank 0\'s own host'
        return unknown(*evidence, late, advice=longer)
    return unknown(*evidence, advice="refused means that nothing listens there now: is rank 0 running, on that port?")


def judge_loopback(evidence: List[str], address: str, several: Optional[bool]) -> Finding:
    what = "a loopback address is another host on each node"
    if address in (socket.gethostname(), socket.getfqdn()) and not address.startswith("localhost"):
        own = "it is this host's own name, and fine here: ask on the other nodes"
        return unknown(*evidence, own)
    if several:
        return exposed(*evidence, what, advice="MASTER_ADDR=<name or address of the first node>, on every node")
    if several is None:
        return unknown(*evidence, f"{what}: fine for one node, wrong for several (nodes=2)")
    return unknown(*evidence, "fine for one node; that it is the store of your job cannot be seen from here")


def answer(ip: str, port: int) -> str:
    try:
        socket.create_connection((ip, port), timeout=PATIENCE_S).close()
        return "accepted"
    except socket.timeout:
        return "timed out"
    except (OSError, OverflowError) as error:
        return str(error)


WRONG_PORT = "rank 1 was given another port than the one where rank 0's store listens"
SAME_PORT = "both ranks have the same endpoint, and each reads the other's key"
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
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=expect, because=because[0], fidelity="cpu", env=env),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu", env=env),
        needs=Needs(packages={"torch": torch}),
        deadline_s=30,
        settle_s=4 if name == "store" else 1,  # there both sides are worth showing
        expected_s=(4.5, 0.1),
    )


probe = Probe(
    params={
        "address": Param("str", "MASTER_ADDR or rendezvous host that the check tries to reach"),
        "port": Param("int", "its port", 29500),
        "nodes": Param("int", "how many nodes the job has; 0: as the launcher's variables say", 0),
    },
    check=check,
    experiments=(
        experiment(
            "store",
            meet_at_the_store,
            "same_endpoint",
            raised(rf"waiting for (clients|workers)\. 1/2 |{UNCONNECTED}"),
            (WRONG_PORT, SAME_PORT),
            ">=2.2",  # before, the host did not complain of missing clients
        ),
    ),
    variants=(
        experiment(
            "missing-rank",
            count_processes,
            "as_started",
            raised(r"waiting for (clients|workers)\. 2/3 "),
            ("WORLD_SIZE is 3 and two processes were started", "WORLD_SIZE counts the two that were started"),
            ">=2.2",
            {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_P2P_DISABLE": "1"},  # tried in vain
        ),
        experiment(
            "nobody-hosts",
            join_c10d,
            "first_is_host",
            raised(r"The connection to the C10d store has failed"),
            (
                "no node takes the endpoint for its own, so both are clients",
                "is_host=1 on the first, is_host=0 on the other",
            ),
        ),
        experiment(
            "tcp-url",
            join_under_torchrun,
            "from_environment",
            raised(UNCONNECTED),
            ("the program has a tcp:// address, where nobody listens under torchrun", "env:// takes the agent's store"),
            ">=2.1,<2.14",  # rank 0 hosts what is not the agent's address since
        ),
        experiment(
            "hosts-file",
            resolve_master,
            "listed",
            raised(rf"cannot be retrieved \(gai error|any network address of|{UNCONNECTED}"),
            ("the master's name is unknown on the other node", "its /etc/hosts has the name"),
        ),
    ),
)
