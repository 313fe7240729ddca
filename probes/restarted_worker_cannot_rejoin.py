"""A process of a running job dies and restarts; it can join only if all other processes restart too."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, List, Mapping, Tuple
from unittest import mock

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

STEPS, CRASH = 8, 4
FRESH = 2  # the number of keys in a new store to which two ranks have connected
CONF = "keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=10,join_timeout=60,is_host=%d"


def train_steps(ctx: Context, life: int, round_number: int, resumed: bool) -> None:
    """Trains with the store of this round; rank 0 saves after each step, and rank 1 dies in life 0 after four steps."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    saved, timeout = Path(ctx.path("saved")), timedelta(seconds=4)
    port = Path(ctx.path("port-%d" % round_number))
    wait_for(port.exists)
    store = dist.TCPStore("127.0.0.1", int(port.read_text()), timeout=timeout, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=ctx.rank, world_size=2, timeout=timeout)
    done = int(saved.read_text()) if resumed and saved.exists() else 0
    if life == 1 and done < CRASH:
        raise Symptom("started again at step %d of %d, after %d steps" % (done, STEPS, int(saved.read_text())))
    for step in range(done + 1, STEPS + 1):
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == 2
        if ctx.rank == 0:
            save(saved, step)
        elif life == 0 and step == CRASH:
            wait_for(lambda: saved.read_text() == str(CRASH))
            os._exit(1)


def restart(ctx: Context, *, together: bool = True, resumed: bool = True) -> None:
    """Runs two ranks, each under a supervisor like that of a pod; rank 1 dies and restarts, alone or with rank 0.

    The supervisor of rank 0 hosts the store of each round.
    """
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            train_steps(ctx, 0, 0, resumed)
        os._exit(1)
    stores = [host_store(ctx, 0)]
    ctx.reached()
    os.waitpid(child, 0)
    assert ctx.meet("ended")  # a newcomer that starts before the others end would hang, and report its error later
    if together:
        stores.append(host_store(ctx, 1))
    if together or ctx.rank == 1:
        train_steps(ctx, 1, int(together), resumed)
    assert ctx.meet("trained", 60)
    assert stores and Path(ctx.path("saved")).read_text() == str(STEPS)


def host_store(ctx: Context, round_number: int) -> Any:
    """Rank 0 hosts the store of a round and publishes its port; other ranks get None."""
    from torch.distributed import TCPStore

    if ctx.rank == 1:
        return None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    save(Path(ctx.path("port-%d" % round_number)), store.port)
    return store


def work() -> None:
    """The training script under torchrun.

    The variable CRASH names the node whose worker dies, and how. With `node`, its torchrun dies too. With `alone?`, the
    restarted worker reports that no other worker restarted. With `first`, it reads the store before anybody writes.
    """
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    node, (dying, how), saved = os.environ["NODE"], os.environ["CRASH"].split(), Path("saved")
    life = len(list(Path().glob("life-%s-*" % node)))
    Path("life-%s-%d" % (node, life)).touch()
    if life == 1 and dying == node and how == "alone?" and not wait_for(Path("life-0-1").exists, 8):
        Path("alone").touch()
        os._exit(1)
    store, rank, world_size = next(rendezvous("env://", timeout=timedelta(seconds=40)))
    if life == 1 and how == "first":  # the first worker of a round reads the store; here it is the one of `dying`
        if node == dying:
            save(Path("keys"), store.num_keys())
        wait_for(Path("keys").exists)
        if int(Path("keys").read_text()) > FRESH:
            os._exit(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=40))
    done = int(saved.read_text()) if saved.exists() else 0
    for step in range(done + 1, STEPS + 1):
        count = torch.ones(1)
        dist.all_reduce(count)
        assert count.item() == 2
        if node == "0":
            save(saved, step)
        if life == 0 and step == CRASH and node == dying:
            wait_for(lambda: saved.read_text() == str(CRASH))
            if how == "node":
                os.kill(os.getppid(), signal.SIGKILL)
            os._exit(1)
        if life == 0 and step == CRASH and how != "node":
            time.sleep(90)  # the survivor notices nothing, as in a long step or a collective of NCCL


def run_nodes(
    ctx: Context,
    *,
    crash: str,
    again: Tuple[int, ...] = (),
    max_restarts: int = 1,
    backend: str = "c10d",
    shared: bool = True,
) -> None:
    """Runs a torchrun on each of two nodes; a supervisor restarts the torchrun of the nodes in `again` once."""
    port = Path(ctx.path("port"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            save(port, free.getsockname()[1])
    ctx.reached()
    os.environ.update(NODE=str(ctx.rank), CRASH=crash)
    if not shared:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = torchrun_options(ctx.rank, port.read_text(), max_restarts, backend)
    if ctx.rank in again:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Exception):
                torchrun(options)
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)  # a worker of a killed torchrun keeps its sockets open for a moment
    try:
        torchrun(options)
    except Exception as error:
        raise_measured(error)
        if ctx.rank in again:
            raise
        time.sleep(90)  # nobody restarts this node, and the other one reports the error
    assert ctx.meet("trained", 60)
    assert Path("saved").read_text() == str(STEPS)
    assert all(Path("life-%d-1" % node).exists() for node in range(2))


def torchrun_options(node: int, port: str, max_restarts: int, backend: str) -> List[str]:
    options = ["--nnodes=2", "--nproc-per-node=1", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    options += ["--start-method=fork", "--max-restarts=%d" % max_restarts]
    if backend == "static":
        options += ["--node-rank=%d" % node, "--master-addr=127.0.0.1", "--master-port=" + port]
    else:
        options += ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=127.0.0.1:" + port]
        options += ["--rdzv-conf=" + CONF % (node == 0)]
    return options


def torchrun(options: List[str]) -> None:
    """Does what the command does, but forks its workers, because importing torch in each takes the most time."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    with mock.patch("inspect.stack", list):  # torch calls it for the name of each event, which takes 20 ms
        elastic_launch(config_from_args(parse_args([*options, "work.py"]))[0], work)()


def raise_measured(error: Exception) -> None:
    """Raises `Symptom` if a worker wrote down what the entry describes before torchrun failed."""
    if Path("alone").exists():
        lives = [len(list(Path().glob("life-%d-*" % node))) for node in range(2)]
        raise Symptom("node 0 and node 1 have started their workers %d and %d times" % tuple(lives)) from error
    if Path("keys").exists():
        keys = Path("keys").read_text()
        raise Symptom("in the new round the store holds %s keys before anybody wrote" % keys) from error


def save(path: Path, value: object) -> None:
    """Writes a file atomically, because other processes poll it."""
    path.with_suffix(".part").write_text(str(value))
    os.replace(str(path.with_suffix(".part")), str(path))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
    """Waits until the condition holds or the time is over, and returns whether it holds."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()


def experiment(
    name: str,
    job: Callable[..., None],
    arms: Tuple[Mapping[str, Any], Mapping[str, Any]],
    expect: Expect,
    because: Tuple[str, str],
    torch: str = ">=2.2",
) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(partial(job, **arms[0]), expect, because[0], "cpu"),
        treatment=Arm(partial(job, **arms[1]), completed(), because[1], "cpu"),
        needs=Needs(packages={"torch": torch}),
        deadline_s=120,
        expected_s=(3.0, 3.0),
    )


REFUSED = raised(r"connectFullMesh failed|SO_ERROR: Connection refused|[Tt]imed out connecting|Connect timeout")
probe = Probe(
    experiments=(
        experiment(
            "same-rank",
            restart,
            ({"together": False}, {"together": True}),
            REFUSED,
            (
                "only rank 1 restarts, with the same rank and the store of the first round",
                "both ranks restart, with a new store",
            ),
        ),
    ),
    variants=(
        experiment(
            "resume",
            restart,
            ({"resumed": False}, {"resumed": True}),
            symptom(r"started again at step 0 of 8, after 4 steps"),
            ("all ranks restart, but the script loads no checkpoint", "the script loads the last checkpoint"),
        ),
        experiment(
            "closed",
            partial(run_nodes, crash="1 worker", shared=False),
            ({"max_restarts": 0, "again": (1,)}, {"max_restarts": 1}),
            raised(r"RendezvousClosedError"),
            (
                "--max-restarts=0: the torchrun of node 1 gives up, closes the rendezvous, and its pod restarts it",
                "--max-restarts=1: each torchrun restarts its worker once, from the checkpoint",
            ),
        ),
        experiment(
            "static",
            partial(run_nodes, crash="1 alone?", shared=False),
            ({"backend": "static"}, {"backend": "c10d"}),
            symptom(r"started their workers 1 and 2 times"),
            (
                "with --max-restarts=1 and the static rendezvous, a torchrun does not notify the other node",
                "with the c10d rendezvous, each torchrun learns of the failure",
            ),
        ),
        experiment(
            "agent-lost",
            partial(run_nodes, crash="1 node", again=(1,)),
            ({"shared": True}, {"shared": False}),
            raised(r"wait timeout after \d+ms, keys: /torch\.rendezvous\.job\.[1-9]\d*/"),
            (
                "the torchrun of node 1 is killed and restarts, but node 0 does not publish the store's address again",
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, each round publishes its own address",
            ),
            ">=2.6,<2.15",  # nobody has read the code of 2.15
        ),
        experiment(
            "stale-address",
            partial(run_nodes, crash="1 first"),
            ({"shared": True}, {"shared": False}),
            symptom(r"in the new round the store holds \d+ keys before anybody wrote"),
            (
                "the workers restart, and the first of them finds the addresses of the previous round in the store",
                "with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, the new round has its own store",
            ),
            ">=2.5,<2.15",
        ),
    ),
)
