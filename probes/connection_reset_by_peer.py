"""Rank 0 dies before the first collective because of a truncated file; the other rank reports a network error."""

import time
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping

from kb.host import file_text
from kb.probe import Arm, Context, Experiment, Finding, Probe, completed, exposed, raised, unknown


def start(ctx: Context, *, file_is_whole: bool, timeout_s: float = 10) -> None:
    """Rank 0 reads a file that an earlier run left in the cache; then every rank enters its first collective."""
    import torch

    dist = join_through_tcp_store(ctx) if ctx.backend == "nccl" else ctx.init_process_group(timeout_s=timeout_s)
    cached = Path(ctx.path("cached.pt"))
    if ctx.rank == 0:
        torch.save(torch.ones(50_000), cached)
        if not file_is_whole:
            cached.write_bytes(cached.read_bytes()[:100_000])  # as if the earlier run was killed while it wrote
    ctx.reached()
    if ctx.rank == 0:
        torch.load(cached)
    total = torch.ones(1, device=ctx.device)
    dist.all_reduce(total)
    assert total.item() == ctx.world_size


def start_again(ctx: Context, *, removed: bool) -> None:
    """Rank 0 creates the file if the cache lacks it. The truncated file of an earlier run is there, or is removed."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    cached = Path(ctx.path("cached.pt"))
    if ctx.rank == 0:
        torch.save(torch.ones(50_000), cached)
        cached.write_bytes(cached.read_bytes()[:100_000])
    ctx.reached()
    if ctx.rank == 0:
        if removed:
            cached.unlink()
        if not cached.exists():
            torch.save(torch.ones(50_000), cached)
        torch.load(cached)
    dist.all_reduce(torch.ones(1))


def leave(ctx: Context, *, together: bool) -> None:
    """Rank 0 sends its last message and exits or waits; rank 1 receives the message one second later."""
    import torch

    dist = ctx.init_process_group(timeout_s=10)
    ctx.reached()
    numbers = torch.full((1 << 20,), float(1 - ctx.rank))
    if ctx.rank == 0:
        work = dist.isend(numbers, 1)
        ctx.note(sent=work is not None)
    else:
        time.sleep(1)
        dist.recv(numbers, 0)
        assert numbers.min().item() == 1
    if not together:
        return
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def arrive_late(ctx: Context, *, timeout_s: float) -> None:
    """Rank 1 comes late to a collective. Rank 0 stays alive, whether its timeout has expired or not."""
    import torch

    dist = ctx.init_process_group(timeout_s=timeout_s)
    ctx.reached()
    total = torch.ones(1)
    if ctx.rank == 1:
        time.sleep(5)
        dist.all_reduce(total)
    else:
        try:
            dist.all_reduce(total)
        except RuntimeError as error:
            ctx.note(gave_up=str(error))
            time.sleep(10)
            return
    assert total.item() == ctx.world_size


def join_through_tcp_store(ctx: Context) -> Any:
    """Joins as without torchrun: rank 0 hosts the store. NCCL sets up its communicator at the first collective."""
    from datetime import timedelta

    import torch.distributed

    dist: Any = torch.distributed
    port = Path(ctx.path("port"))
    timeout = timedelta(seconds=20)
    store = None
    if ctx.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timeout, wait_for_workers=False)
        port.write_text(str(store.port))
    ctx.meet("store")
    if store is None:
        store = dist.TCPStore("127.0.0.1", int(port.read_text()), timeout=timeout, wait_for_workers=False)
    dist.init_process_group("nccl", store=store, rank=ctx.rank, world_size=ctx.world_size, timeout=timeout)
    return dist


def check(_: Mapping[str, Any]) -> Finding:
    """Did the OOM killer kill a process of this container or job? A rank that it kills leaves no traceback."""
    killed = [f"the OOM killer killed {kills} processes: {path}" for path, kills in kills_in_own_cgroups()]
    if killed:
        advice = "if a rank ended with exit code -9 or 137, compare its time with dmesg -T"
        return exposed(*killed, advice=advice)
    return unknown(
        f"the cgroups of this process show no OOM kill; this host shows {kills_since_boot()} since boot",
        "kb cannot see a peer on another host, or one that died for another reason",
        advice="find the rank whose log ends first, and look up its exit code",
    )


def kills_in_own_cgroups() -> List[Any]:
    """(file, number of kills) of the cgroups of this process, version 2 and 1, if there were any."""
    result = []
    for line in file_text("/proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        files = {"": "/sys/fs/cgroup%s/memory.events", "memory": "/sys/fs/cgroup/memory%s/memory.oom_control"}
        if controllers in files:
            path = files[controllers] % group.rstrip("/")
            kills = counter(file_text(path), "oom_kill")
            if kills:
                result.append((path, kills))
    return result


def kills_since_boot() -> str:
    kills = counter(file_text("/proc/vmstat"), "oom_kill")
    return "an unknown number" if kills is None else str(kills)


def counter(text: str, name: str) -> Any:
    """The value of a `name value` line, or None."""
    return next((int(line.split()[1]) for line in text.splitlines() if line.split()[:1] == [name]), None)


DIES = "rank 0 dies on a truncated file while the other rank waits for it"
RESET = r"store->get\('\d+'\) got error: .*(Connection reset by peer|Broken pipe|[Ff]ailed to recv, got 0 bytes)"
CLOSED = r"pair\.cc:\d+\].*Connection (closed|reset) by peer"
TORN = "failed finding central directory"
LIVES = "the file is complete, so rank 0 survives and joins the all-reduce"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(start, file_is_whole=False),
        expect=raised(CLOSED, after=TORN),
        because=DIES,
        fidelity="cpu",
    ),
    treatment=Arm(partial(start, file_is_whole=True), expect=completed(), because=LIVES, fidelity="cpu"),
    expected_s=(0.1, 0.1),
)

remove_file = Experiment(
    name="remove-file",
    control=Arm(
        partial(start_again, removed=False),
        expect=raised(CLOSED, after=TORN),
        because="a truncated file is in the cache, so rank 0 does not create it again",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(start_again, removed=True),
        expect=completed(),
        because="the truncated file is removed, so rank 0 creates it again",
        fidelity="cpu",
    ),
    expected_s=(0.1, 0.1),
)
early_exit = Experiment(
    name="early-exit",
    control=Arm(
        partial(leave, together=False),
        expect=raised(CLOSED),
        because="rank 0 exits without an error before rank 1 has received its message",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(leave, together=True),
        expect=completed(),
        because="every rank ends with a barrier and destroy_process_group",
        fidelity="cpu",
    ),
    linger=False,  # leaving early is the incident
    expected_s=(1.1, 1.1),
)
longer_timeout = Experiment(
    name="longer-timeout",
    control=Arm(
        partial(start, file_is_whole=False, timeout_s=1800),
        expect=raised(CLOSED, after=TORN),
        because=f"{DIES}; a timeout of 30 minutes does not help",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(start, file_is_whole=True, timeout_s=1800), expect=completed(), because=LIVES, fidelity="cpu"
    ),
    expected_s=(0.1, 0.1),
)
gave_up = Experiment(
    name="gave-up",
    control=Arm(
        partial(arrive_late, timeout_s=2),
        expect=raised(CLOSED),
        because="rank 0 gives up after 2 s but stays alive; rank 1 comes after 5 s",
        fidelity="cpu",
    ),
    treatment=Arm(
        partial(arrive_late, timeout_s=30),
        expect=completed(),
        because="the timeout is 30 s, so rank 0 waits for rank 1",
        fidelity="cpu",
    ),
    expected_s=(5.1, 5.1),
)

probe = Probe(
    check=check,
    experiments=(gloo.on_gpus(expect=raised(RESET, after=TORN), expected_s=(10, 10), settle_s=5), gloo),
    variants=(remove_file, early_exit, longer_timeout, gave_up),
)
