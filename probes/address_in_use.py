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
    """Rank 0 is the earlier job and lives on; rank 1 is rank 0 of the next job. No fixed port is touched."""
    from torch.distributed import TCPStore

    options = {"is_master": True, "wait_for_workers": False, "timeout": timedelta(seconds=10)}
    note = Path(ctx.path("port"))
    if ctx.rank == 0:
        earlier = TCPStore("127.0.0.1", 0, **options)
        earlier.set("job", "earlier")
        note.write_text(str(earlier.port))
    ctx.reached()
    if ctx.rank == 1:
        held = int(note.read_text())
        mine = TCPStore("127.0.0.1", 0 if port_of_its_own else held, **options)
        ctx.note(port_of_earlier_job=held, port_of_next_job=mine.port)
        mine.set("job", "next")
        assert mine.port != held and mine.get("job") == b"next"
    ctx.meet("second job done")  # the earlier job keeps its port until then
    if ctx.rank == 0:
        assert earlier.get("job") == b"earlier"  # neither job saw the other's keys


def start_beside_leftover(ctx: Context, *, ended: bool) -> None:
    """A process of the last run holds the port, and a connection on it. `kill -9` by its pid, then no pause."""
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
    """The port in the command is taken; MASTER_PORT names a free one, and torchrun's option too, or not."""
    from torch.distributed import run

    for name in [name for name in os.environ if name.startswith("PET_")]:
        del os.environ[name]  # torchrun takes its options from there as well
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
    """Two processes under `env://`, whose RANK differs, or is 0 in both, as where a launcher starts a launcher."""
    import torch.distributed as dist

    note = Path(ctx.path("port"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as any_port:
            note.write_text(str(any_port.getsockname()[1]))
    ctx.reached()
    rank = ctx.rank if own_rank else 0
    if ctx.rank == 1:
        time.sleep(0.5)  # which of the two binds first does not matter; here it is the first
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=note.read_text())
    dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    dist.barrier()


def choose_port(ctx: Context, *, below_range: bool) -> None:
    """The port is that of an outgoing connection of some program, or one that the kernel lends to none."""
    from torch.distributed import TCPStore

    low, high = lent_ports()
    if not high:
        raise Unavailable("/proc does not say which ports the kernel lends")
    server = socket.create_server(("127.0.0.1", 0))
    with server, socket.create_connection(server.getsockname()) as outgoing:
        port = outgoing.getsockname()[1]
        if below_range:
            ports = [*range(10000 + os.getpid() % 10000, low), *range(1024, low), *range(high + 1, 65536)]
            port = next((port for port in ports if outcome_of_bind("0.0.0.0", port) == "free"), 0)
            if not port:
                raise Unavailable("the kernel lends nearly every port: %d to %d" % (low, high))
        ctx.note(port=port, kernel_lends_from=low)
        ctx.reached()
        TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)


def check(params: Mapping[str, Any]) -> Finding:
    """Could a store bind the port now? Binds it as torch does, without listening, and releases it at once."""
    port = params["port"]
    if not 0 < port < 65536:
        return unknown(f"{port} is no port that several ranks can agree on: 1 to 65535")
    dual, ipv4 = outcome_of_bind("::", port), outcome_of_bind("0.0.0.0", port)
    find = f"ss -tanp 'sport = :{port}'"
    if ipv4 == "EADDRINUSE":
        advice = f"end the holder if it is a leftover ({find}), otherwise give this job another port, or --standalone"
        return exposed(f"port {port} is taken on this host", *sockets(port), advice=advice)
    if ipv4 != "free":
        return unknown(f"binding port {port} fails for another reason: {ipv4}")
    if dual == "EADDRINUSE":
        half = f"port {port} is taken for IPv6 only: a store starts on IPv4 without an error, and clients may miss it"
        return exposed(half, *sockets(port), advice=f"find the holder ({find}) or give this job another port")
    low, high = lent_ports()
    if not high:
        return unknown(f"port {port} can be bound now; which ports the kernel lends to connections cannot be read")
    if low <= port <= high and not is_reserved(port):
        why = f"port {port} is free now, but in the range {low}-{high} that the kernel gives to outgoing connections"
        outside = f"below {low}" if low > 2048 else f"above {high}" if high < 65000 else ""
        reserve = "reserve one as root: net.ipv4.ip_local_reserved_ports"
        return exposed(why, advice=f"choose a MASTER_PORT {outside}" if outside else reserve)
    return clear(
        f"port {port} can be bound now, on this host and in this network namespace (rank 0's is the one that counts)",
        "`--set port=N` asks about another one",
    )


def lent_ports() -> Tuple[int, int]:
    """The first and last port that the kernel gives to outgoing connections; zeros where it does not say."""
    bounds = re.findall(r"\d+", file_text("/proc/sys/net/ipv4/ip_local_port_range"))
    return (int(bounds[0]), int(bounds[1])) if len(bounds) == 2 else (0, 0)


def is_reserved(port: int) -> bool:
    """Has root kept the port out of that range?"""
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
    """One line for each socket whose local end is this port, with its owner if this user may see it."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in file_text(f"/proc/net/{name}").splitlines()[1:]]
    result = [
        (STATES.get(row[3], f"state {row[3]}"), row[7], f"socket:[{row[9]}]")
        for row in rows
        if len(row) > 9 and row[1].endswith(":%04X" % port)
    ]
    owners = holders({name for _, _, name in result})
    lines = [f"{state}, uid {uid}, {owners.get(name, 'process not visible from here')}" for state, uid, name in result]
    return lines[:5] or ["no table lists the holder: a socket that is bound and does not listen is in none"]


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
            command = file_text(f"/proc/{pid}/cmdline").split("\0")[:3]  # what runs, and no more of its arguments
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
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=IN_USE, because=because[0], fidelity="cpu"),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu"),
        world_size=world_size,
        deadline_s=30,
        expected_s=(1.2, 0.3),
    )


probe = Probe(
    params={"port": Param("int", "port that the check asks about, normally your MASTER_PORT", 29500)},
    check=check,
    experiments=(
        experiment(
            "store",
            start_second_job,
            "port_of_its_own",
            (
                "the next job asks for the port on which the earlier one still listens",
                "the next job takes a port that the kernel chooses (0) and both jobs run side by side",
            ),
            world_size=2,
        ),
    ),
    variants=(
        experiment(
            "leftover",
            start_beside_leftover,
            "ended",
            ("a process of the last run holds the port", "that process gets SIGKILL, and the store starts at once"),
        ),
        experiment(
            "torchrun-port",
            start_torchrun,
            "in_option",
            (
                "the port in torchrun's command is taken; MASTER_PORT, which it does not read, is free",
                "--master-port has the free port",
            ),
        ),
        experiment(
            "rank-0-twice",
            take_rank,
            "own_rank",
            ("RANK is 0 in two processes, and each wants to host", "RANK is 0 and 1"),
            world_size=2,
        ),
        experiment(
            "outgoing",
            choose_port,
            "below_range",
            (
                "the port is that of an outgoing connection; nobody listens on it",
                "the port lies below those that the kernel lends to connections",
            ),
        ),
    ),
)
