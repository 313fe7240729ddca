"""The process that hosts the TCPStore exits, and a rank that still needs the store gets a network error."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path
from typing import Any, Callable, Mapping, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Needs, Probe, completed, exposed, raised, unknown

REPORTS = 40  # two seconds, enough for the host of the store to exit even on a loaded machine


def finish(ctx: Context, *, leave_together: bool, timeout_s: float = 15) -> None:
    """After the last all-reduce, rank 1 still reports its evaluation through the store."""
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
    """Ranks 1 and 2 create a sub-group, which needs the store, after the last step of rank 0."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", store=open_store(ctx, 15), rank=ctx.rank, world_size=ctx.world_size)
    ctx.reached()
    if ctx.rank > 0:
        time.sleep(2)  # until rank 0 has exited
        group = dist.new_group([1, 2], use_local_synchronization=True)
        total = torch.ones(1)
        dist.all_reduce(total, group=group)
        assert total.item() == 2
    if leave_together:
        dist.barrier()
        dist.destroy_process_group()


def report_to_agent(ctx: Context, *, agent_hosts: bool) -> None:
    """Rank 1 reports after rank 0 has exited. Rank 0 hosts the store, or rank 2, which stands for torchrun's agent."""
    store = open_store(ctx, 15, host=2 if agent_hosts else 0)
    ctx.reached()
    if ctx.rank == 1:
        for batch in range(REPORTS):
            store.set(f"accuracy of batch {batch}", "0.9")
            time.sleep(0.05)
        Path(ctx.path("done")).touch()
    elif ctx.rank == 2:
        while not Path(ctx.path("done")).exists():  # an agent runs as long as its workers
            time.sleep(0.01)


def open_store(ctx: Context, timeout_s: float, host: int = 0) -> Any:
    """Rank 0 hosts the store, as with `env://`, unless `host` names another. The kernel chooses the port."""
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
    """Runs two single-node jobs with torchrun's own rendezvous code. The job that started first ends first."""
    import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend as c10d
    from torch.distributed.elastic.rendezvous import RendezvousParameters

    port = Path(ctx.path("port"))
    endpoint = "localhost:0"  # any free port, as with --standalone
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
        for _ in range(REPORTS):  # an agent polls like this while its workers run
            assert backend.get_state()[0] == b"running"
            time.sleep(0.05)


def check(_: Mapping[str, Any]) -> Finding:
    """Does rank 0 or torchrun's agent host the store of this job, and do torchrun processes share an endpoint?"""
    where = f"{os.environ.get('MASTER_ADDR', '?')}:{os.environ.get('MASTER_PORT', '?')}"
    agent_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE")
    agents = agents_here()
    ports = list(agents.values())
    shared = [endpoint for endpoint in sorted(set(ports)) if ports.count(endpoint) > 1]
    if shared:
        pids = ", ".join(pid for pid, endpoint in agents.items() if endpoint in shared)
        return exposed(
            f"multiple torchrun processes on this host share the rendezvous endpoint {shared[0]}: pid {pids}",
            "each runs a single-node job, and when the first job ends, the others fail",
            advice="give each job its own --rdzv-endpoint, for single-node jobs localhost:0",
        )
    if agent_store == "True":
        return unknown(
            f"torchrun's agent hosts the store at {where} (TORCHELASTIC_USE_AGENT_STORE), so rank 0 may exit first",
            "kb cannot tell whether another user's torchrun shares its endpoint; with localhost:0 none does",
        )
    if agent_store == "False" or os.environ.get("RANK"):
        text = "TORCHELASTIC_USE_AGENT_STORE is False" if agent_store else "RANK is set without torchrun's agent store"
        return unknown(
            f"{text}, so with env:// rank 0 hosts the store at {where}",
            "kb cannot tell whether rank 0 exits first",
            advice="check in the code that every rank ends with a barrier",
        )
    return unknown("this process has no variables of a job, and kb sees no two torchrun processes with one endpoint")


def agents_here() -> Mapping[str, str]:
    """Maps process ids to c10d endpoints: every visible single-node torchrun, except those with port 0.

    Counts only the interpreter that runs torchrun, not `srun` or `timeout`, whose command lines name torchrun too.
    """
    result = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace").split("\0")
            is_ours = os.readlink(path.parent / "ns/net") == os.readlink("/proc/self/ns/net")
        except OSError:  # the process has ended, or belongs to another user
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
TOGETHER = "every rank ends with a barrier, so rank 0 runs until the others are done"

STORE = Experiment(
    name="store",
    control=Arm(
        partial(finish, leave_together=False),
        expect=GONE,
        because="rank 0 exits, and the store with it, while rank 1 still writes to the store",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(finish, leave_together=True),
        expect=completed(),
        because=TOGETHER,
        fidelity="cpu",
    ),
    deadline_s=40,
    linger=False,  # the early exit is the incident
    expected_s=(0.3, 2.3),
)


def variant(name: str, job: Callable[..., None], fix: str, because: Tuple[str, str], world_size: int = 3) -> Experiment:
    """`fix` is the keyword that is False in the control arm and True in the treatment arm."""
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
            ("rank 0 exits, and the others create a sub-group, which needs its store", TOGETHER),
        ),
        variant(
            "agent-store",
            report_to_agent,
            "agent_hosts",
            ("rank 0 hosts the store, and exits before rank 1", "a process that outlives the ranks hosts the store"),
        ),
        variant(
            "longer-timeout",
            partial(finish, timeout_s=1800),
            "leave_together",
            ("rank 0 exits, and the store with it, although the timeout is 30 minutes", TOGETHER),
            world_size=2,
        ),
        Experiment(
            name="torchrun",
            control=Arm(
                partial(run_two_jobs, own_endpoint=False),
                expect=raised(r"The connection to the C10d store has failed"),
                because="two jobs share an endpoint, so the agent of the first, which exits, hosts the store of both",
                fidelity="cpu",
            ),
            treatment=Arm(
                partial(run_two_jobs, own_endpoint=True),
                expect=completed(),
                because="each job has its own endpoint, as with --standalone",
                fidelity="cpu",
            ),
            needs=Needs(packages={"torch": ">=2.1"}),
            deadline_s=40,
            linger=False,
            expected_s=(0.5, 2.5),
        ),
    ),
)
