"""An earlier job still hosts a TCPStore on the port that the next job needs."""

import errno
import os
import socket
from functools import partial
from glob import glob
from pathlib import Path
from typing import Any, List, Mapping, Set

from kb.probe import Arm, Context, Experiment, Finding, Param, Probe, clear, completed, exposed, raised, unknown


def start_second_job(ctx: Context, *, port_of_its_own: bool) -> None:
    """Rank 0 is the earlier job and lives on; rank 1 is rank 0 of the next job. No fixed port is touched."""
    from datetime import timedelta

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


def check(params: Mapping[str, Any]) -> Finding:
    """Could a store bind the port now? Binds it as torch does, without listening, and releases it at once."""
    port = params["port"]
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
    low, high = (int(bound) for bound in read_file("/proc/sys/net/ipv4/ip_local_port_range").split() or (32768, 60999))
    if low <= port <= high:
        why = f"port {port} is free now, but in the range {low}-{high} that the kernel gives to outgoing connections"
        return exposed(why, advice=f"choose a MASTER_PORT below {low}")
    return clear(f"port {port} can be bound now, in this network namespace (`--set port=N` asks about another one)")


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
    rows = [line.split() for name in ("tcp", "tcp6") for line in read_file(f"/proc/net/{name}").splitlines()[1:]]
    result = [
        (STATES.get(row[3], f"state {row[3]}"), row[7], f"socket:[{row[9]}]")
        for row in rows
        if int(row[1].rsplit(":", 1)[1], 16) == port
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
            command = read_file(f"/proc/{pid}/cmdline").split("\0")[:3]  # what runs, and no more of its arguments
            result[name] = f"pid {pid}: {' '.join(command)[:100].strip()}"
    return result


def read_file(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""


IN_USE = r"server socket has failed to listen on any local network address.{0,300}(EADDRINUSE|errno: 98)"

probe = Probe(
    params={"port": Param("int", "port that the check asks about, normally your MASTER_PORT", 29500)},
    check=check,
    experiments=(
        Experiment(
            name="store",
            control=Arm(
                partial(start_second_job, port_of_its_own=False),
                expect=raised(IN_USE),
                because="the next job asks for the port on which the earlier one still listens",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(start_second_job, port_of_its_own=True),
                expect=completed(),
                because="the next job takes a port that the kernel chooses (0) and both jobs run side by side",
                fidelity="cpu",
            ),
            deadline_s=30,
            expected_s=(1.2, 0.1),
        ),
    ),
)
