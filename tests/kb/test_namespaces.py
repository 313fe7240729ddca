"""Namespaces are made for real, by an ordinary user in a forked process, and nothing of them is seen outside."""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kb.namespaces import (
    bind_over,
    bring_up,
    join_nodes,
    lay_cable,
    own_network,
    own_user,
    run_two_nodes,
    tmpfs_over,
)
from kb.probe import Context, Symptom, Unavailable

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12

NOBODY = 65534
SHM = Path("/dev/shm")  # a folder that an ordinary user reaches, unlike tmp_path
SYSCTL = Path("/proc/sys/user/max_user_namespaces")  # the limit of the user namespace in which it is read and written


def in_child(act: Callable[[], object]) -> Any:
    """What `act` returns as an ordinary user in a process of its own; raises `Unavailable` if it does."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        answer_and_end(act, writable)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        answer = pipe.read()
    os.waitpid(pid, 0)
    assert answer, "the child ended without an answer"
    kind, value = json.loads(answer)
    if kind == "Unavailable":
        raise Unavailable(value)
    assert kind == "returned", f"{kind}: {value}"
    return value


def answer_and_end(act: Callable[[], object], writable: int) -> NoReturn:
    end_in_20_s()
    try:
        become_ordinary()
        answer = ["returned", act()]
    except BaseException as error:
        answer = [type(error).__name__, str(error)]
    os.write(writable, json.dumps(answer).encode())
    os._exit(0)


def end_in_20_s() -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(20)


def become_ordinary() -> None:
    if os.getuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: the files in /proc/self are ours again


@pytest.fixture
def allowed() -> None:
    """Ask another program whether this machine lets an ordinary user make namespaces."""
    user = NOBODY if os.getuid() == 0 else None
    try:
        asked = subprocess.run(
            ["unshare", "--user", "--map-root-user", "--mount", "--net", "--uts", "true"],
            user=user,
            cwd="/",
            capture_output=True,
            text=True,
        )
    except OSError as error:  # there is no such program, or this root may be nobody else
        pytest.skip(f"nobody can be asked whether namespaces are allowed: {error}")
    if asked.returncode:
        pytest.skip(f"namespaces are forbidden here: {asked.stderr.strip()}")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- user -------------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allowed")
def test_a_user_is_root_inside_and_stays_the_same_user_outside() -> None:
    def job() -> list[int]:
        outside = os.getuid()
        own_user()
        return [outside, os.getuid(), os.getgid(), *map(int, Path("/proc/self/uid_map").read_text().split())]

    outside, *inside = in_child(job)
    assert outside != 0
    assert inside == [0, 0, 0, outside, 1]


def forbid_user_namespaces(uid: int) -> None:
    """In a user namespace in which one is called `uid`: no further one below it."""
    maps = {"setgroups": "deny", "uid_map": f"{uid} {os.getuid()} 1", "gid_map": f"{uid} {os.getgid()} 1"}
    assert ctypes.CDLL(None).unshare(0x10000000) == 0
    for name, text in maps.items():
        Path("/proc/self", name).write_text(text)
    SYSCTL.write_text("0")


@pytest.mark.usefixtures("allowed")
def test_forbidden_user_namespaces_are_reported_to_an_ordinary_user() -> None:
    def job() -> None:
        forbid_user_namespaces(1000)
        own_user()

    with pytest.raises(Unavailable, match=r"^no user namespace of its own on this machine: No space left on device$"):
        in_child(job)


@pytest.mark.usefixtures("allowed")
def test_root_does_without_a_user_namespace_where_it_is_forbidden() -> None:
    def job() -> list[str]:
        forbid_user_namespaces(0)
        before = os.readlink("/proc/self/ns/user")
        own_user()
        assert os.readlink("/proc/self/ns/user") == before
        tmpfs_over(str(SHM), 1)
        return names(SHM)

    assert in_child(job) == []


@pytest.mark.usefixtures("allowed")
def test_a_user_namespace_that_cannot_be_mapped_is_unavailable() -> None:
    def job() -> None:
        own_user()
        tmpfs_over("/proc", 1)
        own_user()

    with pytest.raises(Unavailable, match=r"^no user namespace of its own on this machine: No such file"):
        in_child(job)


@pytest.mark.parametrize(
    ("act", "lacking"),
    [
        (lambda: tmpfs_over(str(SHM), 1), "no mount namespace of its own on this machine"),
        (lambda: bind_over(os.devnull, "/etc/hosts"), "no mount namespace of its own on this machine"),
        (own_network, "no network of its own on this machine"),
        (lambda: lay_cable("kb0", "kb1", os.getpid()), "no virtual cable between two networks"),
        (lambda: bring_up("lo"), "cannot bring up lo"),
    ],
)
def test_without_a_user_namespace_an_ordinary_user_may_do_nothing(act: Callable[[], None], lacking: str) -> None:
    with pytest.raises(Unavailable, match=rf"^{lacking}.*: Operation not (permitted|supported)$"):
        in_child(act)


# --- mounts -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allowed")
def test_a_tmpfs_of_1_mib_is_full_after_1_mib_and_seen_by_its_process_only() -> None:
    def job() -> list[int]:
        own_user()
        tmpfs_over(str(SHM), 1)
        with (SHM / "kb-filled").open("wb", buffering=0) as file:
            written = file.write(b"x" * (1 << 20))
            try:
                file.write(b"x")
            except OSError as error:
                return [written, error.errno or 0]
        return [written, 0]

    mounted = Path("/proc/self/mounts").read_text()
    assert in_child(job) == [1 << 20, errno.ENOSPC]
    assert Path("/proc/self/mounts").read_text() == mounted
    assert not (SHM / "kb-filled").exists()


@pytest.mark.usefixtures("allowed")
def test_mounts_of_root_do_not_propagate_to_shared_mounts() -> None:
    def job() -> list[str]:
        own_user()
        tmpfs_over(str(SHM), 1)
        (SHM / "kb-seen").touch()
        assert ctypes.CDLL(None).mount(b"none", b"/", None, 0x104000, None) == 0  # MS_SHARED, as systemd has it
        other = os.fork()
        if other == 0:
            end_in_20_s()
            tmpfs_over(str(SHM), 1)
            os._exit(17 if names(SHM) == [] else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 17
        return names(SHM)

    assert in_child(job) == ["kb-seen"]


@pytest.mark.usefixtures("allowed")
def test_a_file_takes_the_place_of_another_for_its_process_only() -> None:
    def job() -> list[str]:
        own_user()
        tmpfs_over(str(SHM), 1)
        (SHM / "hosts").write_text("127.0.1.1 kb-node-0\n")
        bind_over(str(SHM / "hosts"), "/etc/hosts")
        return [Path("/etc/hosts").read_text(), *names(SHM)]

    before = Path("/etc/hosts").read_text()
    assert in_child(job) == ["127.0.1.1 kb-node-0\n", "hosts"]
    assert Path("/etc/hosts").read_text() == before


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: tmpfs_over("/no/such/folder", 1), "cannot mount a tmpfs: No such file or directory"),
        (lambda: bind_over("/dev/null", "/no/such"), "cannot mount /dev/null over /no/such: No such file or directory"),
    ],
)
def test_a_mount_that_fails_says_why(act: Callable[[], None], reason: str) -> None:
    def job() -> None:
        own_user()
        act()

    with pytest.raises(Unavailable, match=f"^{reason}$"):
        in_child(job)


# --- networks ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("allowed")
def test_a_network_of_its_own_has_another_loopback_and_another_host_name() -> None:
    with socket.create_server(("127.0.0.1", 0)) as outside:

        def tried() -> str:
            with socket.socket() as client:
                return errno.errorcode.get(client.connect_ex(outside.getsockname()), "connected")

        def job() -> list[str]:
            own_user()
            seen = [tried()]
            own_network("kb-node-0")
            seen.append(tried())
            bring_up("lo")
            return [*seen, tried(), socket.gethostname()]

        assert in_child(job) == ["connected", "ENETUNREACH", "ECONNREFUSED", "kb-node-0"]
    assert socket.gethostname() != "kb-node-0"


@pytest.mark.usefixtures("allowed")
def test_a_network_keeps_the_host_name_if_none_is_given() -> None:
    def job() -> str:
        own_user()
        own_network()
        return socket.gethostname()

    assert in_child(job) == socket.gethostname()


def answer_over_the_cable(parent: socket.socket) -> NoReturn:
    """The other node: a network, then, once the cable is laid, a server that answers one byte in upper case."""
    end_in_20_s()
    try:
        own_network()
        parent.sendall(b"my network is made")
        parent.recv(100)
        bring_up("kb1", "10.83.0.2")
        with socket.create_server(("10.83.0.2", 0)) as server:
            parent.sendall(str(server.getsockname()[1]).encode())
            caller, _ = server.accept()
            with caller:
                caller.sendall(caller.recv(1).upper())
    finally:
        os._exit(0)


@pytest.mark.usefixtures("allowed")
def test_two_networks_with_a_cable_exchange_a_byte() -> None:
    def job() -> list[str]:
        own_user()
        ours, theirs = socket.socketpair()
        other = os.fork()
        if other == 0:
            ours.close()
            answer_over_the_cable(theirs)
        theirs.close()
        own_network()
        ours.recv(100)
        lay_cable("kb0", "kb1", other)
        bring_up("kb0", "10.83.0.1")
        ours.sendall(b"the cable is laid")
        port = int(ours.recv(100))
        with socket.socket() as call:
            call.connect(("10.83.0.2", port))
            call.sendall(b"a")
            heard = call.recv(1).decode()
            caller = call.getsockname()[0]
        os.waitpid(other, 0)
        return [heard, caller]

    assert with_a_cable(job) == ["A", "10.83.0.1"]


@pytest.mark.usefixtures("allowed")
def test_both_ends_of_a_cable_may_be_in_the_same_network() -> None:
    def job() -> list[str]:
        own_user()
        own_network()
        lay_cable("br-kb0", "kbbr1", os.getpid())
        return sorted(name for _, name in socket.if_nameindex() if "kb" in name)

    assert with_a_cable(job) == ["br-kb0", "kbbr1"]
    assert "br-kb0" not in [name for _, name in socket.if_nameindex()]


def with_a_cable(job: Callable[[], object]) -> Any:
    try:
        return in_child(job)
    except Unavailable as error:
        if "(veth)" in str(error) and "not supported" in str(error):
            pytest.skip(str(error))
        raise


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("act", "reason"),
    [
        (lambda: bring_up("kbnosuch0"), "cannot bring up kbnosuch0: No such device"),
        (lambda: bring_up("lo", "not an address"), "cannot bring up lo: illegal IP address string"),
        (lambda: lay_cable("lo", "kb1", os.getpid()), r"no virtual cable .* \(veth\) on this machine: File exists"),
    ],
)
def test_what_a_network_refuses_has_a_reason(act: Callable[[], None], reason: str) -> None:
    def job() -> None:
        own_user()
        own_network()
        act()

    with pytest.raises(Unavailable, match=f"^{reason}"):
        in_child(job)


# --- two nodes --------------------------------------------------------------------------------------------------------


def outcome_of_nodes(live: Callable[[Context], None], nodes_s: float = 15.0) -> str:
    """How two nodes end, as an ordinary user in a folder of its own."""

    def job() -> str:
        with tempfile.TemporaryDirectory(dir=SHM) as folder:
            try:
                run_two_nodes(Context(0, 1, "gloo", Path(folder), {}), live, nodes_s)
            except (RuntimeError, Symptom, Unavailable) as error:
                return f"{type(error).__name__}: {error}"
        return "completed"

    return str(in_child(job))


@pytest.mark.usefixtures("allowed")
def test_nodes_reach_each_other_over_the_cable() -> None:
    def live(node: Context) -> None:
        own_network()
        join_nodes(node, "kb0")
        if node.rank == 0:
            with socket.create_server(("10.83.0.1", 4000)) as server:
                node.reached()
                server.accept()[0].close()
        else:
            node.reached()
            socket.create_connection(("10.83.0.1", 4000), timeout=5).close()

    assert outcome_of_nodes(live) == "completed"


@pytest.mark.usefixtures("allowed")
@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (Symptom("measured"), "Symptom: measured"),
        (Unavailable("no veth"), "Unavailable: no veth"),
        (ValueError("broken"), "RuntimeError: node 1: broken"),
    ],
)
def test_the_failure_of_a_node_is_that_of_the_job_and_ends_the_other(error: Exception, outcome: str) -> None:
    def live(node: Context) -> None:
        if node.rank == 1:
            raise error
        time.sleep(60)

    assert outcome_of_nodes(live) == outcome


@pytest.mark.usefixtures("allowed")
def test_nodes_that_do_not_end_are_killed() -> None:
    assert outcome_of_nodes(lambda _: time.sleep(60), nodes_s=0.2) == "RuntimeError: a node did not end within 0.2 s"
