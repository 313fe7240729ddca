"""A process of a running job dies and is started again: it can join only if all the others start again too."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Tuple
from unittest import mock

from kb.probe import Arm, Context, Expect, Experiment, Needs, Probe, Symptom, completed, raised, symptom

STEPS, CRASH = 8, 4
FRESH = 2  # keys in a store to which two ranks have just connected
CONF = "keep_alive_interval=1,keep_alive_max_attempt=4,read_timeout=10,join_timeout=60,is_host=%d"


def train_steps(ctx: Context, life: int, store_of: int, resumed: bool) -> None:
    """Rank 1 dies in its first life after four steps; rank 0 saves after each step."""
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    saved, port, timeout = Path(ctx.path("saved")), Path(ctx.path("port-%d" % store_of)), timedelta(seconds=4)
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


def start_again(ctx: Context, *, together: bool = True, resumed: bool = True) -> None:
    """Two processes of fixed rank. Each has a supervisor, as a pod has; that of rank 0 hosts the store of a start."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(Exception):
            train_steps(ctx, 0, 0, resumed)
        os._exit(1)
    stores = [host_store(ctx, 0)]
    ctx.reached()
    os.waitpid(child, 0)
    assert ctx.meet("ended")  # a newcomer that is quicker than the end of the others hangs, and says so later
    if together:
        stores.append(host_store(ctx, 1))
    if together or ctx.rank == 1:
        train_steps(ctx, 1, int(together), resumed)
    assert ctx.meet("trained", 60)
    assert stores and Path(ctx.path("saved")).read_text() == str(STEPS)


def host_store(ctx: Context, life: int) -> Any:
    from torch.distributed import TCPStore

    if ctx.rank == 1:
        return None
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    save(Path(ctx.path("port-%d" % life)), store.port)
    return store


def work() -> None:
    """What a worker of torchrun runs: the same steps. `CRASH` names the node that dies, and whether its agent does."""
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
    if life == 1 and how == "first":  # whichever worker is first reads what the store holds; here that of `dying` is
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
            time.sleep(90)  # a survivor that notices nothing: a long step, or NCCL without its peer


def run_nodes(
    ctx: Context,
    *,
    crash: str,
    again: Tuple[int, ...] = (),
    max_restarts: int = 1,
    backend: str = "c10d",
    shared: bool = True,
) -> None:
    """Two nodes with a torchrun each. A node in `again` has a supervisor that starts its torchrun a second time."""
    from torch.distributed.launcher.api import elastic_launch
    from torch.distributed.run import config_from_args, parse_args

    port = Path(ctx.path("port"))
    if ctx.rank == 0:
        with socket.create_server(("127.0.0.1", 0)) as free:
            save(port, free.getsockname()[1])
    ctx.reached()
    os.environ.update(NODE=str(ctx.rank), CRASH=crash)
    if not shared:
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    options = ["--nnodes=2", "--nproc-per-node=1", "--monitor-interval=0.1", "--local-addr=127.0.0.1"]
    options += ["--start-method=fork", "--max-restarts=%d" % max_restarts]
    if backend == "static":
        options += ["--node-rank=%d" % ctx.rank, "--master-addr=127.0.0.1", "--master-port=" + port.read_text()]
    else:
        options += ["--rdzv-backend=c10d", "--rdzv-id=job", "--rdzv-endpoint=127.0.0.1:" + port.read_text()]
        options += ["--rdzv-conf=" + CONF % (ctx.rank == 0)]

    def torchrun() -> None:
        """What the command does; but its workers are forked, since to import torch in each takes the most time."""
        with mock.patch("inspect.stack", list):  # which torch asks for the name of each event, at 20 ms a time
            elastic_launch(config_from_args(parse_args([*options, "work.py"]))[0], work)()

    if ctx.rank in again:
        child = os.fork()
        if child == 0:
            with contextlib.suppress(Exception):
                torchrun()
            os._exit(0)
        os.waitpid(child, 0)
        time.sleep(0.5)  # a worker of a killed torchrun has its sockets for a moment more
    try:
        torchrun()
    except Exception as error:
        if Path("alone").exists():
            lives = [len(list(Path().glob("life-%d-*" % node))) for node in range(2)]
            raise Symptom("node 0 and node 1 have started their workers %d and %d times" % tuple(lives)) from error
        if Path("keys").exists():
            raise Symptom(
                "in the new round the store holds %s keys before anybody wrote" % Path("keys").read_text()
            ) from error
        if ctx.rank in again:
            raise
        time.sleep(90)  # nobody starts it again, and the other node shows what that means
    assert ctx.meet("trained", 60)
    assert Path("saved").read_text() == str(STEPS)
    assert all(Path("life-%d-1" % node).exists() for node in range(2))


def save(path: Path, what: object) -> None:
    path.with_suffix(".part").write_text(str(what))
    os.replace(str(path.with_suffix(".part")), str(path))


def wait_for(condition: Callable[[], bool], seconds: float = 20) -> bool:
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
            start_again,
            ({"together": False}, {"together": True}),
            REFUSED,
            ("rank 1 alone starts again, with its rank and the store of the first start", "both ranks start again"),
        ),
    ),
    variants=(
        experiment(
            "resume",
            start_again,
            ({"resumed": False}, {"resumed": True}),
            symptom(r"started again at step 0 of 8, after 4 steps"),
            ("all ranks start again, and the script loads nothing", "it loads the last checkpoint"),
        ),
        experiment(
            "closed",
            partial(run_nodes, crash="1 worker", shared=False),
            ({"max_restarts": 0, "again": (1,)}, {"max_restarts": 1}),
            raised(r"RendezvousClosedError"),
            (
                "torchrun may not restart: that of node 1 gives up, closes the rendezvous, and a pod starts it again",
                "each torchrun restarts its worker once, from the checkpoint",
            ),
        ),
        experiment(
            "static",
            partial(run_nodes, crash="1 alone?", shared=False),
            ({"backend": "static"}, {"backend": "c10d"}),
            symptom(r"started their workers 1 and 2 times"),
            ("--max-restarts=1 with the static rendezvous: the agents tell each other nothing", "the c10d rendezvous"),
        ),
        experiment(
            "agent-lost",
            partial(run_nodes, crash="1 node", again=(1,)),
            ({"shared": True}, {"shared": False}),
            raised(r"wait timeout after \d+ms, keys: /torch\.rendezvous\.job\.[1-9]\d*/"),
            (
                "torchrun of node 1 is killed and started again; node 0 does not publish the store's address again",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, so that each round has an address of its own",
            ),
            ">=2.6,<2.15",  # 2.15 was not read
        ),
        experiment(
            "stale-address",
            partial(run_nodes, crash="1 first"),
            ({"shared": True}, {"shared": False}),
            symptom(r"in the new round the store holds \d+ keys before anybody wrote"),
            (
                "the workers start again, and the first of them finds the addresses of the round before in the store",
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1: the new round has a store of its own",
            ),
            ">=2.5,<2.15",
        ),
    ),
)
