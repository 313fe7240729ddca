"""Two nodes live in networks of their own, joined by a cable; how they end is how the job ends."""

from __future__ import annotations

import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from kb.namespaces import join_nodes, own_network, run_two_nodes
from kb.probe import Context, Symptom, Unavailable
from tests.support.ordinary_user import in_child

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # since 3.12

SHM = Path("/dev/shm")  # a folder that an ordinary user reaches, unlike tmp_path


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
