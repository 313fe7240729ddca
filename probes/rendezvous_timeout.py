"""One rank connects to a port where no store listens, so rank 0's store waits for it in vain."""

import ipaddress
import socket
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, Dict, Mapping

from kb.probe import Arm, Context, Experiment, Finding, Needs, Param, Probe, clear, completed, exposed, raised, unknown

TIMEOUT_S = 3  # not less: the start of a store on loopback stalled for seconds on a loaded machine


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
    except (OSError, subprocess.TimeoutExpired) as error:
        return unknown(f"could not look up {address}: {error}")
    items = list(dict.fromkeys(line.split()[0] for line in looked_up.stdout.splitlines()))
    if not items:
        return exposed(f"{address} does not resolve here", advice="DNS or /etc/hosts of this node, or MASTER_ADDR=<IP>")
    answers = {ip: answer(ip, port) for ip in items[:2]}
    evidence = [f"{address} is {ip}, port {port}: {what}" for ip, what in answers.items()]
    if any(ipaddress.ip_address(ip.split("%")[0]).is_loopback for ip in items):
        return exposed(*evidence, advice="a loopback address is another host on each node: fine for one node only")
    if "accepted" in answers.values():
        return clear(*evidence, "that it is the store of your job cannot be seen from here")
    if "timed out" in answers.values():
        return exposed(
            *evidence, advice="a packet filter, a wrong route or a wrong address: try from rank 0's own host"
        )
    return unknown(*evidence, advice="refused means that nothing listens there now: is rank 0 running, on that port?")


def answer(ip: str, port: int) -> str:
    try:
        socket.create_connection((ip, port), timeout=0.3).close()
        return "accepted"
    except socket.timeout:
        return "timed out"
    except (OSError, OverflowError) as error:
        return str(error)


probe = Probe(
    params={
        "address": Param("str", "MASTER_ADDR or rendezvous host that the check tries to reach"),
        "port": Param("int", "its port", 29500),
    },
    check=check,
    experiments=(
        Experiment(
            name="store",
            control=Arm(
                partial(meet_at_the_store, same_endpoint=False),
                expect=raised(r"waiting for (clients|workers)\. 1/2 |client socket has timed out after \d+ms"),
                because="rank 1 was given another port than the one where rank 0's store listens",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(meet_at_the_store, same_endpoint=True),
                expect=completed(),
                because="both ranks have the same endpoint, and each reads the other's key",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.2"}),  # before, the host did not complain of missing clients
            deadline_s=30,
            settle_s=4,
            expected_s=(6, 0.1),
        ),
    ),
)
