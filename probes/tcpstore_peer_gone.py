"""The process that hosts the TCPStore completes and exits; a rank that still needs the store sees a broken network."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Probe, completed, exposed, raised, unknown

REPORTS = 40  # two seconds, in which the host of the store leaves on a loaded machine too


def finish(ctx: Context, *, leave_together: bool, timeout_s: float = 15) -> None:
    """The last all-reduce is done on both ranks; rank 1 still reports its evaluation through the store."""
    import torch

    store = open_store(ctx, timeout_s)
    options = {"device_id": ctx.device} if ctx.backend == "nccl" else {}
    dist: Any = torch.distributed
    dist.init_process_group(ctx.backend, store=store, rank=ctx.rank, world_size=ctx.world_size, **options)
    total = torch.ones(1, device=ctx.device)
    dist.all_reduce(total)
    assert total.item() == ctx.world_size
    ctx.reached()
    if ctx.rank == 1:
        for batch in range(REPORTS):
            ctx.note(reported_batches=batch)
            store.set(f"accuracy of batch {batch}", "0.9")
            time.sleep(0.05)
    if not leave_together:
        return
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def finish_with_sub_group(ctx: Context, *, leave_together: bool) -> None:
    """Ranks 1 and 2 make a group of their own, which needs the store, after the last step of rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=open_store(ctx, 15), rank=ctx.rank, world_size=ctx.world_size)
    ctx.reached()
    if ctx.rank > 0:
        time.sleep(2)  # until rank 0 has left
        group = dist.new_group([1, 2], use_local_synchronization=True)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2
    if leave_together:
        dist.barrier()
        dist.destroy_process_group()


def report_to_agent(ctx: Context, *, agent_hosts: bool) -> None:
    """Rank 0 is done, rank 1 reports. The store is in rank 0's process, or in that of rank 2, the launcher's agent."""
    store = open_store(ctx, 15, host=2 if agent_hosts else 0)
    ctx.reached()
    if ctx.rank == 1:
        for batch in range(REPORTS):
            store.set(f"accuracy of batch {batch}", "0.9")
            time.sleep(0.05)
        Path(ctx.path("done")).touch()
    elif ctx.rank == 2:
        while not Path(ctx.path("done")).exists():  # an agent stays as long as its workers
            time.sleep(0.01)


def open_store(ctx: Context, timeout_s: float, host: int = 0) -> Any:
    """As under `env://`: rank 0's process is the host. The port is the kernel's choice."""
    from datetime import timedelta

    from torch.distributed import TCPStore

    port = Path(ctx.path("port"))
    patience = timedelta(seconds=timeout_s)
    if ctx.rank == host:
        store = TCPStore("127.0.0.1", 0, is_master=True, timeout=patience, wait_for_workers=False)
        port.write_text(str(store.port))
    assert ctx.meet("store is up")
    if ctx.rank == host:
        return store
    return TCPStore("127.0.0.1", int(port.read_text()), timeout=patience, wait_for_workers=False)


def run_two_jobs(ctx: Context, *, own_endpoint: bool) -> None:
    """Two jobs of one node, each with torchrun's own rendezvous code; the one that started first ends first."""
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    port = Path(ctx.path("port"))
    endpoint = "localhost:0"  # as --standalone has it: any free port
    if ctx.rank == 1:
        assert ctx.meet("first job is up")
        if not own_endpoint:
            endpoint = f"localhost:{port.read_text()}"
    job = RendezvousParameters("c10d", endpoint, f"job {ctx.rank}", 1, 1, read_timeout=15)
    backend, store = c10d.create_backend(job)
    if ctx.rank == 0:
        port.write_text(str(store.port))
        assert ctx.meet("first job is up")
    backend.set_state(b"running")
    ctx.reached()
    if ctx.rank == 1:
        for _ in range(REPORTS):  # the agent asks like this as long as its workers run
            assert backend.get_state()[0] == b"running"
            time.sleep(0.05)


def check(_: Mapping[str, Any]) -> Finding:
    """Who hosts the store of the job whose variables this process has: rank 0's process, or torchrun's agent?"""
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    owned = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    agents = agents_here()
    ports = list(agents.values())
    shared = [endpoint for endpoint in sorted(set(ports)) if ports.count(endpoint) > 1]
    if shared:
        pids = ", ".join(pid for pid, endpoint in agents.items() if endpoint in shared)
        return exposed(
            f"several torchrun processes of this host share the rendezvous endpoint {shared[0]}: pid {pids}",
            "each runs a job of one node: the end of the first ends the others",
            advice="one --rdzv-endpoint per job, localhost:0 for jobs of one node",
        )
    if owned == "True":
        return unknown(
            f"torchrun's agent hosts the store at {where} (TORCHELASTIC_USE_AGENT_STORE), so rank 0 may leave first",
            "whether another user's torchrun shares its endpoint cannot be seen from here: with localhost:0 none does",
        )
    if owned == "False" or os.environ.get("RANK"):
        text = "TORCHELASTIC_USE_AGENT_STORE is False" if owned else "RANK is set without torchrun's agent store"
        return unknown(
            f"{text}: with env:// rank 0's own process hosts the store at {where}",
            "whether rank 0 leaves first is a matter of the code: does every rank end with a barrier?",
        )
    return unknown("no variables of a job here, and no two torchrun processes that can be seen share an endpoint")


def agents_here() -> Mapping[str, str]:
    """Process id to c10d endpoint of every visible single-node torchrun, without those on a free port.

    The interpreter that runs it, not the `srun` or `timeout` before it, whose command line names it too.
    """
    result = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            is_ours = os.readlink(path.parent / "ns/net") == os.readlink("/proc/self/ns/net")
        except OSError:  # gone, or another user's
            continue
        is_python = os.path.basename(words[0]).startswith(("python", "pypy"))
        is_torchrun = any(word.endswith(("/torchrun", "torch.distributed.run")) for word in words[1:4])
        if not (is_ours and is_python and is_torchrun):
            continue
        options = {}
        for at, word in enumerate(words):
            name, _, value = word.partition("=")
            options[name.replace("_", "-")] = value or "".join(words[at + 1 : at + 2])
        endpoint = options.get("--rdzv-endpoint") or "localhost:29400"
        is_single_node = options.get("--nnodes", "1").split(":")[-1] == "1"
        if options.get("--rdzv-backend") == "c10d" and is_single_node and not endpoint.endswith(":0"):
            result[path.parent.name] = endpoint
    return result


GONE = raised(r"Broken pipe|Connection reset by peer|[Ff]ailed to (recv, got|send, sent) 0 bytes")
TOGETHER = "every rank ends with a barrier, so rank 0 stays until the others are done"

STORE = Experiment(
    name="store",
    control=Arm(
        partial(finish, leave_together=False),
        expect=GONE,
        because="rank 0 is done and leaves with the store, while rank 1 still writes to it",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(finish, leave_together=True),
        expect=completed(),
        because=TOGETHER,
        fidelity="cpu",
    ),
    deadline_s=40,
    linger=False,  # leaving early is the incident
    expected_s=(0.3, 2.3),
)


def variant(name: str, job: Callable[..., None], fix: str, because: Tuple[str, str], world_size: int = 3) -> Experiment:
    """`fix` is the keyword of the job that differs; `because` says what the arms do without and with it."""
    return Experiment(
        name=name,
        control=Arm(partial(job, **{fix: False}), expect=GONE, because=because[0], fidelity="cpu"),
        treatment=Arm(partial(job, **{fix: True}), expect=completed(), because=because[1], fidelity="cpu"),
        world_size=world_size,
        deadline_s=40,
        linger=False,
        expected_s=(0.7, 2.7),
    )


probe = Probe(
    check=check,
    experiments=(STORE.on_gpus(), STORE),
    variants=(
        variant(
            "sub-group",
            finish_with_sub_group,
            "leave_together",
            ("rank 0 leaves, and the others make a group without it, through its store", TOGETHER),
        ),
        variant(
            "agent-store",
            report_to_agent,
            "agent_hosts",
            ("rank 0's process hosts the store and leaves", "a process that outlives the ranks hosts the store"),
        ),
        variant(
            "longer-timeout",
            partial(finish, timeout_s=1800),
            "leave_together",
            ("rank 0 leaves with the store; the timeout is 30 minutes", TOGETHER),
            world_size=2,
        ),
        Experiment(
            name="torchrun",
            control=Arm(
                partial(run_two_jobs, own_endpoint=False),
                expect=raised(r"The connection to the C10d store has failed"),
                because="the second job was given the endpoint of the first, whose agent hosts the store of both",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(run_two_jobs, own_endpoint=True),
                expect=completed(),
                because="each job has an endpoint of its own, as with --standalone",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=40,
            linger=False,
            expected_s=(0.5, 2.5),
        ),
    ),
)
