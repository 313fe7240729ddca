"""Rank 0 works alone for twice the process group's timeout while rank 1 waits for it, as `zero_first` does."""

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
    monitored_s: float = 0,
    afterwards: bool = False,
) -> None:
    """One rank works for 3 s, and the others wait in a barrier: with `patient` in a gloo group with its own timeout.

    `monitored_s` is the timeout of a monitored barrier, which names the late rank, instead of a barrier. `afterwards`
    raises the timeout of the existing group.
    """
    import time
    from datetime import timedelta

    import torch

    timeout_s = 6.0 if ctx.backend == "nccl" else timeout_s
    work_s = 12.0 if ctx.backend == "nccl" else 3.0
    late = 1 if monitored_s else 0

    def prepare() -> None:
        time.sleep(0 if before_launch else work_s)  # tokenise, evaluate, merge, upload: anything but a collective

    dist = ctx.init_process_group(timeout_s=timeout_s)
    waiting_room = dist.new_group(backend="gloo", timeout=timedelta(hours=4))
    if afterwards:
        set_timeout: Any = dist.set_timeout  # type: ignore[attr-defined,unused-ignore]
        set_timeout(timedelta(hours=4))
    ctx.reached()
    if monitored_s:
        if dist.get_rank() == late:
            prepare()
        dist.monitored_barrier(group=waiting_room, timeout=timedelta(seconds=monitored_s), wait_all_ranks=True)
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


LONGEST_DEFAULT_S = 1800.0  # the default of torch before 2.2, transformers' ddp_timeout, and axolotl


def check(params: Mapping[str, Any]) -> Finding:
    """Does one rank work alone for longer than the others wait for it?"""
    alone_s, allowed_s = params["alone_s"], params["timeout_s"]
    if alone_s is None:
        return unknown(
            default_timeout(),
            "kb does not know how long one rank of your job works alone",
            advice="measure how long one rank works alone, then run --set alone_s=2400 --set timeout_s=1800",
        )
    alone = f"one rank works alone for {alone_s:.0f} s"
    if not alone_s > 0 or not (allowed_s is None or allowed_s > 0):
        return unknown(alone, f"timeout_s is {allowed_s}", advice="pass both in seconds, and above 0")
    if allowed_s is None and alone_s < LONGEST_DEFAULT_S:
        return unknown(
            alone,
            default_timeout(),
            advice="run --set timeout_s=600, the Timeout(ms) in your log in seconds",
        )
    if allowed_s is None:
        waits = f"kb knows no default timeout that is longer than {LONGEST_DEFAULT_S:.0f} s"
    else:
        waits = f"the others wait {allowed_s:.0f} s"
        if allowed_s / 2 < alone_s < allowed_s:
            return unknown(
                alone, waits, "the next run may take longer, with other data, a cold cache, or a busy file system"
            )
    if alone_s >= (LONGEST_DEFAULT_S if allowed_s is None else allowed_s):
        advice = "do this work before the launch, or let the others wait in a gloo group with its own timeout"
        return exposed(alone, waits, advice=advice)
    return clear(alone, waits)


def default_timeout() -> str:
    if not release("torch"):
        return "kb finds no torch in this environment, so it does not know the default timeout"
    default_s = 600 if release("torch") >= (2, 2) else 1800
    name = "torch " + version("torch")
    return f"{name} waits {default_s} s in a group with only nccl, unless the job or its framework passes a timeout"


SHORT = "rank 1 waits in the training group, whose timeout is half the time that rank 0 works"
LONG = "rank 1 waits in a gloo group with a longer timeout; the training group keeps the short one"

gloo = Experiment(
    name="gloo",
    control=Arm(
        partial(prepare_then_train, patient=False),
        expect=raised(GLOO_TIMEOUT),
        because=SHORT,
        fidelity="cpu",
    ),
    treatment=Arm(partial(prepare_then_train, patient=True), expect=completed(), because=LONG, fidelity="cpu"),
    settle_s=2.5,  # the slow rank has time to finish its work and to find the connection closed
    expected_s=(3.1, 3.1),
)


def variant(
    name: str, change: Mapping[str, Any], because: str, fix: str, torch: str = ">=2.1", **broken: Any
) -> Experiment:
    """`broken` has the arguments of the control arm, and `change` those that the treatment arm changes."""
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
        variant("raised", {"timeout_s": 20.0}, SHORT, "the training group has a timeout longer than the work"),
        variant(
            "set-timeout",
            {"afterwards": True},
            SHORT,
            "dist.set_timeout raises the timeout of the existing group on every rank",
            torch=">=2.14",
        ),
        variant(
            "before-launch",
            {"before_launch": True},
            SHORT,
            "rank 0 did the work before the launch, and finds its result",
        ),
        variant(
            "monitored",
            {"monitored_s": 20.0},
            "rank 1 is late, and a monitored barrier waits for it for only 1 s",
            "the monitored barrier waits longer than rank 1 works",
            monitored_s=1.0,
        ),
    ),
)
