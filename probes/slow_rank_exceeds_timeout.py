"""Rank 0 works alone for twice the process group's timeout while the other rank waits for it, as `zero_first` does."""

from functools import partial
from importlib import metadata
from typing import Any, Mapping

from kb.probe import (
    GLOO_TIMEOUT,
    Arm,
    Context,
    Experiment,
    Finding,
    Param,
    Probe,
    clear,
    completed,
    exposed,
    raised,
    unknown,
)


def prepare_then_train(ctx: Context, *, patient: bool) -> None:
    import time
    from datetime import timedelta

    import torch

    timeout_s = 6.0 if ctx.backend == "nccl" else 1.5
    dist = ctx.init_process_group(timeout_s=timeout_s)
    waiting_room = dist.new_group(backend="gloo", timeout=timedelta(minutes=2))
    ctx.reached()
    if ctx.rank == 0:
        time.sleep(2 * timeout_s)  # tokenise, evaluate, merge, upload: anything that is no collective
    if patient:
        dist.barrier(group=waiting_room)
    else:
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
    if alone_s >= (LONGEST_DEFAULT_S if allowed_s is None else allowed_s):
        advice = "do this work before the launch, or let the others wait in a gloo group with its own timeout"
        return exposed(alone, waits, advice=advice)
    return clear(alone, waits)


def torchs_default() -> str:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "torch is not installed here, so its default timeout is not known"
    default_s = 600 if tuple(int(part) for part in version.split(".")[:2]) >= (2, 2) else 1800
    return f"torch {version} waits {default_s} s in an nccl group unless the job or its framework passes a timeout"


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

probe = Probe(
    check=check,
    params={
        "alone_s": Param("float", "seconds that one rank works while the others wait, as measured in your job"),
        "timeout_s": Param("float", "seconds that the others wait: Timeout(ms) / 1000 in the watchdog's line"),
    },
    experiments=(
        gloo.on_gpus(
            expect=raised(r"Watchdog caught collective operation timeout: WorkNCCL\(.*OpType=ALLREDUCE"),
            expected_s=(20, 20),
            settle_s=5,
        ),
        gloo,
    ),
)
