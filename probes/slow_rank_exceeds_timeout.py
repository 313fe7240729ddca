"""Rank 0 works alone for twice the process group's timeout while the other rank waits for it, as `zero_first` does."""

from functools import partial
from typing import Any, Mapping

from kb.packages import release, version
from kb.probe import (
    GLOO_TIMEOUT,
    NCCL2_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)


def prepare_then_train(
    ctx: Context,
    *,
    patient: bool = False,
    timeout_s: float = 1.5,
    before_launch: bool = False,
    asks: float = 0,
    afterwards: bool = False,
) -> None:
    """One rank works for 3 s. `asks` is after how many seconds a monitored barrier names it, instead of a barrier.

    `afterwards` raises the timeout of the group that exists.
    """
    import time
    from datetime import timedelta

    import torch

    timeout_s = 6.0 if ctx.backend == "nccl" else timeout_s
    work_s = 12.0 if ctx.backend == "nccl" else 3.0
    late = 1 if asks else 0

    def prepare() -> None:
        time.sleep(0 if before_launch else work_s)  # tokenise, evaluate, merge, upload: anything that is no collective

    dist = ctx.init_process_group(timeout_s=timeout_s)
    waiting_room = dist.new_group(backend="gloo", timeout=timedelta(hours=4))
    if afterwards:
        set_timeout: Any = dist.set_timeout  # type: ignore[attr-defined,unused-ignore]
        set_timeout(timedelta(hours=4))
    ctx.reached()
    if asks:
        if dist.get_rank() == late:
            prepare()
        dist.monitored_barrier(group=waiting_room, timeout=timedelta(seconds=asks), wait_all_ranks=True)
    elif patient:
        if dist.get_rank() == 0:
            prepare()
        dist.barrier(group=waiting_room)
    else:
        if dist.get_rank() == 0:
            prepare()
        dist.barrier()
    gradient = torch.ones(1, device=ctx.device)
    dist.all_reduce(gradient)
    assert gradient.item() == ctx.world_size


LONGEST_DEFAULT_S = 1800.0  # torch before 2.2, transformers' ddp_timeout, axolotl


def check(params: Mapping[str, Any]) -> Finding:
    """Compare how long one rank works alone with how long the others wait for it."""
    alone_s, allowed_s = params["alone_s"], params["timeout_s"]
    if alone_s is None:
        return unknown(
            torchs_default(),
            "how long one of your ranks works alone cannot be seen from here",
            advice="measure the longest stretch that one rank works alone: --set alone_s=2400 --set timeout_s=1800",
        )
    alone = f"one rank works alone for {alone_s:.0f} s"
    if not alone_s > 0 or not (allowed_s is None or allowed_s > 0):
        return unknown(alone, f"timeout_s={allowed_s}", advice="pass both in seconds, as measured and as logged")
    if allowed_s is None and alone_s < LONGEST_DEFAULT_S:
        return unknown(
            alone,
            torchs_default(),
            advice="pass the Timeout(ms) that your log shows, in seconds: --set timeout_s=600",
        )
    if allowed_s is None:
        waits = f"no default timeout known to us is longer than {LONGEST_DEFAULT_S:.0f} s"
    else:
        waits = f"the others wait {allowed_s:.0f} s"
        if allowed_s / 2 < alone_s < allowed_s:
            return unknown(alone, waits, "the next run may take longer: other data, a cold cache, a busy file system")
    if alone_s >= (LONGEST_DEFAULT_S if allowed_s is None else allowed_s):
        advice = "do this work before the launch, or let the others wait in a gloo group with its own timeout"
        return exposed(alone, waits, advice=advice)
    return clear(alone, waits)


def torchs_default() -> str:
    if not release("torch"):
        return "no release of torch is installed here, so its default timeout is not known"
    default_s = 600 if release("torch") >= (2, 2) else 1800
    name = "torch " + version("torch")
    return f"{name} waits {default_s} s in a group of nccl alone unless the job or its framework passes a timeout"


SHORT = "the others wait in the training group, whose timeout is half of what rank 0 needs"
LONG = "the others wait in a gloo group with its own timeout; training keeps the short one"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(prepare_then_train, patient=False),
        expect=raised(GLOO_TIMEOUT),
        because=SHORT,
        fidelity="cpu",
    ),
    treatment=Arm(partial(prepare_then_train, patient=True), expect=completed(), because=LONG, fidelity="cpu"),
    settle_s=2.5,  # the slow rank is to finish its work and to meet the closed connection
    expected_s=(3.1, 3.1),
)


def variant(
    name: str, change: Mapping[str, Any], because: str, fix: str, torch: str = ">=2.1", **broken: Any
) -> Experiment:
    """`change` is what the treatment arm changes, `broken` the job of the control arm."""
    named = r"\[Rank 0\]: Ranks? 1 failed to pass monitoredBarrier in 1000 ms"
    expect = raised(named if broken else GLOO_TIMEOUT)
    return Experiment(
        name=name,
        control=Arm(partial(prepare_then_train, **broken), expect=expect, because=because, fidelity="cpu"),
        treatment=Arm(
            partial(prepare_then_train, **{**broken, **change}), expect=completed(), because=fix, fidelity="cpu"
        ),
        needs=Needs(packages={"torch": torch}),
        expected_s=(1.8, 3.1),
    )


probe = Probe(
    check=check,
    params={
        "alone_s": Param("float", "seconds that one rank works while the others wait, as measured in your job"),
        "timeout_s": Param("float", "seconds that the others wait: Timeout(ms) / 1000 in the watchdog's line"),
    },
    experiments=(
        gloo.on_gpus(
            expect=raised(
                rf"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE|{NCCL2_TIMEOUT}"
            ),
            expected_s=(20, 20),
            settle_s=5,
        ),
        gloo,
    ),
    variants=(
        variant("raised", {"timeout_s": 20.0}, SHORT, "the training group is made with a timeout above that work"),
        variant(
            "set-timeout",
            {"afterwards": True},
            SHORT,
            "dist.set_timeout raises the timeout of the group that exists, on every rank",
            torch=">=2.14",
        ),
        variant("before-launch", {"before_launch": True}, SHORT, "the work was done before; rank 0 finds its result"),
        variant(
            "monitored",
            {"asks": 20.0},
            "rank 1 is late, and a monitored barrier waits for it 1 s",
            "the same barrier waits longer than rank 1 works",
            asks=1.0,
        ),
    ),
)
