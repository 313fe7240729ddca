"""Networks and the cables between them are made for real, by an ordinary user, and nothing of them is seen outside."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from kb.namespaces import bring_up, lay_cable, own_network, own_user
from kb.probe import Unavailable
from tests.support.ordinary_user import end_in_20_s, in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12


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
