"""An earlier job still hosts a TCPStore on the port that the next job needs."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, Callable, List, Mapping, Set, Tuple

from kb.host import file_text
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    Unavailable,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)


def start_second_job(ctx: Context, *, port_of_its_own: bool) -> None:
    """Rank 0 is the earlier job, which keeps running; rank 1 is the next job's rank 0. The kernel chooses all ports."""
    from torch.distributed import TCPStore

    options = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=10)}
    port_file = Path(ctx.path("port"))
    if ctx.rank == 0:
        earlier = TCPStore("127.0.0.1", 0, **options)
        earlier.set("job", "earlier")
        port_file.write_text(str(earlier.port))
    ctx.reached()
    if ctx.rank == 1:
        taken_port = int(port_file.read_text())
        store = TCPStore("127.0.0.1", 0 if port_of_its_own else taken_port, **options)
        ctx.note(port_of_earlier_job=taken_port, port_of_next_job=store.port)
        store.set("job", "next")
        assert store.port != taken_port and store.get("job") == b"next"
    ctx.meet("second job done")  # the earlier job keeps its port until the second job is done
    if ctx.rank == 0:
        assert earlier.get("job") == b"earlier"  # neither job saw the other's keys


def start_beside_leftover(ctx: Context, *, ended: bool) -> None:
    """A process of the last run holds the port and a connection. The job kills it, or not, and starts at once."""
    from torch.distributed import TCPStore

    holder = subprocess.Popen([sys.executable, "-S", "-c", HOLDER], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    try:
        port = int(holder.stdout.readline())
        connection = socket.create_connection(("127.0.0.1", port), timeout=10)
        assert holder.stdout.readline() == b"accepted\n"
        ctx.reached()
        if ended:
            os.kill(holder.pid, signal.SIGKILL)
            holder.wait()
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        connection.close()
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()


def start_torchrun(ctx: Context, *, in_option: bool) -> None:
    """MASTER_PORT is a free port; torchrun's option --master-port is the same free port, or one that is taken."""
    from torch.distributed import run

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun also reads its options from these variables
    script = Path(ctx.path("train.py"))
    script.write_text("")
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as any_port:
        port = free = any_port.getsockname()[1]
        any_port.close()
        os.environ["MASTER_PORT"] = str(free)
        if not in_option:
            port = taken.getsockname()[1]
        ctx.reached()
        options = ["--nnodes=1", "--nproc-per-node=1", "--master-addr=127.0.0.1", "--monitor-interval=0.1"]
        run.run(run.parse_args([*options, f"--master-port={port}", str(script)]))


def take_rank(ctx: Context, *, own_rank: bool) -> None:
    """Two processes start with `env://`; RANK is 0 and 1, or 0 in both, as when a launcher starts a launcher."""
    import torch.distributed as dist

    port_file = Path(ctx.path("port"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as any_port:
            port_file.write_text(str(any_port.getsockname()[1]))
    ctx.reached()
    rank = ctx.rank if own_rank else 0
    if ctx.rank == 1:
        time.sleep(0.5)  # so that always the same process binds first; either order shows the incident
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port_file.read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    dist.barrier()


def choose_port(ctx: Context, *, below_range: bool) -> None:
    """The port is in use by an outgoing connection, or outside the range that the kernel gives to connections."""
    from torch.distributed import TCPStore

    low, high = ephemeral_ports()
    if not high:
        raise Unavailable("/proc does not say which ports the kernel gives to outgoing connections")
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as outgoing:
        port = outgoing.getsockname()[1]
        if below_range:
            ports = [*range(10000 + os.getpid() % 10000, low), *range(1024, low), *range(high + 1, 65536)]
            port = next((port for port in ports if outcome_of_bind("0.0.0.0", port) == "free"), 0)
            if not port:
                raise Unavailable("the kernel gives nearly every port to connections: %d to %d" % (low, high))
        ctx.note(port=port, first_ephemeral_port=low)
        ctx.reached()
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def check(params: Mapping[str, Any]) -> Finding:
    """Could a store bind the port now? Binds it as torch does, without listening, and releases it at once."""
    port = params["port"]
    if not 0 < port < 65536:
        return unknown(f"{port} is not a port number between 1 and 65535, on which several ranks could agree")
    dual, ipv4 = outcome_of_bind("::", port), outcome_of_bind("0.0.0.0", port)
    find = f"ss -tanp 'sport = :{port}'"
    if ipv4 == "EADDRINUSE":
        advice = f"end the process on it if it is a leftover ({find}), otherwise use another port, or --standalone"
        return exposed(f"port {port} is taken on this host", *sockets(port), advice=advice)
    if ipv4 != "free":
        return unknown(f"binding port {port} fails for another reason: {ipv4}")
    if dual == "EADDRINUSE":
        half = f"port {port} is taken for IPv6 only; a store starts on IPv4 without an error, and clients may miss it"
        return exposed(
            half, *sockets(port), advice=f"find the process on it ({find}), or use another port for this job"
        )
    low, high = ephemeral_ports()
    if not high:
        return unknown(f"port {port} can be bound now, but kb cannot read which ports the kernel gives to connections")
    if low <= port <= high and not is_reserved(port):
        in_range = f"port {port} is free now, but in the range {low}-{high}, which the kernel gives to connections"
        outside = f"below {low}" if low > 2048 else f"above {high}" if high < 65000 else ""
        reserve = "reserve a port as root: net.ipv4.ip_local_reserved_ports"
        return exposed(in_range, advice=f"choose a MASTER_PORT {outside}" if outside else reserve)
    job_port = os.environ.get("MASTER_PORT", "")
    if job_port not in ("", str(port)):
        differs = f"MASTER_PORT is {job_port}, which counts unless a launcher sets it"
        return unknown(f"port {port} can be bound now", differs, advice=f"run --set port={job_port} as well")
    return clear(
        f"port {port} can be bound now in this network namespace; what counts is the one of rank 0",
        "`--set port=N` checks another port",
    )


def ephemeral_ports() -> Tuple[int, int]:
    """The first and last port that the kernel gives to outgoing connections; zeros if it does not say."""
    bounds = re.findall(r"\d+", file_text("/proc/sys/net/ipv4/ip_local_port_range"))
    return (int(bounds[0]), int(bounds[1])) if len(bounds) == 2 else (0, 0)


def is_reserved(port: int) -> bool:
    """Does net.ipv4.ip_local_reserved_ports exclude the port from that range?"""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", file_text("/proc/sys/net/ipv4/ip_local_reserved_ports"))
    return any(int(first) <= port <= int(last or first) for first, last in ranges)


def outcome_of_bind(address: str, port: int) -> str:
    """`free`, or the name of the error. Sets SO_REUSEADDR as torch does, so that two such binds do not conflict."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if ":" in address:
                tried.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            tried.bind((address, port))
        return "free"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except OverflowError as error:
        return str(error)


STATES = {"01": "ESTABLISHED", "06": "TIME_WAIT", "0A": "LISTEN"}


def sockets(port: int) -> List[str]:
    """One line for each socket on this local port, with its process if this user may see it."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in file_text(f"/proc/net/{name}").splitlines()[1:]]
    result = [
        (STATES.get(row[3], f"state {row[3]}"), row[7], f"socket:[{row[9]}]")
        for row in rows
        if len(row) > 9 and row[1].endswith(":%04X" % port)
    ]
    owners = holders({name for _, _, name in result})
    hidden = "a process that kb cannot see from here"
    lines = [f"{state}, uid {uid}, {owners.get(name, hidden)}" for state, uid, name in result]
    return lines[:5] or ["the kernel's tables do not list the socket, because it is bound but does not listen"]


def holders(sockets: Set[str]) -> Mapping[str, str]:
    """Socket name to `pid N: command`, for the processes whose descriptors this user may read."""
    result = {}
    for descriptor in glob("/proc/[0-9]*/fd/*"):
        try:
            name = os.readlink(descriptor)
        except OSError:
            continue
        if name in sockets:
            pid = descriptor.split("/")[2]
            command = file_text(f"/proc/{pid}/cmdline").split("\0")[:3]  # later arguments may contain secrets
            result[name] = f"pid {pid}: {' '.join(command)[:100].strip()}"
    return result


IN_USE = raised(r"server socket has failed to listen on any local network address.{0,300}(EADDRINUSE|errno: 98)")
HOLDER = """import socket, time
server = socket.create_server(("127.0.0.1", 0))
print(server.getsockname()[1], flush=True)
connection = server.accept()
print("accepted", flush=True)
time.sleep(60)
"""


def experiment(
    name: str, job: Callable[..., None], fix: str, because: Tuple[str, str], world_size: int = 1
) -> Experiment:
    """`fix` is the keyword that is True in the treatment; `because` says what the control and the treatment do."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=IN_USE, because=because[0], fidelity="cpu"),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu"),
        world_size=world_size,
        deadline_s=30,
        expected_s=(1.2, 0.3),
    )


probe = Probe(
    params={"port": Param("int", "the port to check, normally your MASTER_PORT", 29500)},
    check=check,
    experiments=(
        experiment(
            "store",
            start_second_job,
            "port_of_its_own",
            (
                "the next job asks for the port on which the earlier one still listens",
                "the next job asks for port 0, so the kernel chooses a free port, and both jobs run side by side",
            ),
            world_size=2,
        ),
    ),
    variants=(
        experiment(
            "leftover",
            start_beside_leftover,
            "ended",
            (
                "a process of the last run still holds the port",
                "the process of the last run gets SIGKILL, and the store starts at once",
            ),
        ),
        experiment(
            "torchrun-port",
            start_torchrun,
            "in_option",
            (
                "the port in torchrun's command is taken, and torchrun does not read MASTER_PORT, which is free",
                "torchrun's option --master-port names the free port",
            ),
        ),
        experiment(
            "rank-0-twice",
            take_rank,
            "own_rank",
            ("RANK is 0 in two processes, so both host a store on the same port", "RANK is 0 and 1"),
            world_size=2,
        ),
        experiment(
            "outgoing",
            choose_port,
            "below_range",
            (
                "an outgoing connection uses the port, on which no process listens",
                "the port is outside the range that the kernel gives to outgoing connections",
            ),
        ),
    ),
)
