"""torch's communication threads stop, because handling a timeout takes long or because native code holds the GIL.

On GPUs: rank 0's collective times out, its watchdog sleeps while other ranks dump, and the heartbeat monitor reports
that the watchdog is stuck. On CPU: rank 0 holds the GIL in native code, and gloo's threads, which need the GIL to
free tensors, stop while rank 1 waits.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from functools import partial
from typing import Any, Mapping

from kb.packages import release
from kb.probe import GLOO_TIMEOUT, Arm, Context, Experiment, Finding, Needs, Probe, completed, exposed, raised, unknown


def arrive_late(ctx: Context, *, timeout_s: float) -> None:
    """Rank 1 comes 20 s late to the second all-reduce."""
    import torch

    dist = ctx.init_process_group(timeout_s=timeout_s)
    total = torch.ones(4, device=ctx.device)
    dist.all_reduce(total)
    torch.cuda.synchronize()
    ctx.reached()
    if ctx.rank == 1:
        time.sleep(20)
    dist.all_reduce(total)
    assert total.tolist() == [4.0] * 4, total.tolist()
    ctx.meet("reduced", timeout_s=30)


def call_native_code(ctx: Context, *, holds_the_gil: bool, in_a_thread: bool = False) -> None:
    """Rank 0 starts six all-reduces, drops the tensors and calls C. Rank 1 runs the same six one by one."""
    import torch

    dist = ctx.init_process_group(timeout_s=2)
    path = None  # the C library
    library: ctypes.CDLL = ctypes.PyDLL(path)
    if not holds_the_gil:
        library = ctypes.CDLL(path)
    dist.all_reduce(torch.ones(1))
    ctx.reached()
    for number in range(6):
        total = torch.full((1 << 16,), ctx.rank + 1.0)
        work = dist.all_reduce(total, async_op=True)
        if ctx.rank == 1:
            work.wait()
            assert total[0].item() == 3, total[0]
            ctx.note(all_reduces_done=number + 1)
        del work, total
    if ctx.rank == 0:
        caller = threading.Thread(target=library.usleep, args=(4_000_000,))
        (caller.start if in_a_thread else caller.run)()
    ctx.meet("done", timeout_s=15)  # the process waits for a running thread when it ends


ON, OFF = ("y", "yes", "1", "t", "true"), ("n", "no", "0", "f", "false")  # c10d/Utils.hpp of torch 2.2 to 2.15


def check(_: Mapping[str, Any]) -> Finding:
    """Do the variables give the watchdog enough time to handle a timeout, and is the monitor on?"""
    torch = release("torch")[:2]
    if not torch:
        return unknown("torch is not installed in this interpreter, or kb cannot read its version")
    if not (2, 3) <= torch <= (2, 15):
        return unknown("the monitor of torch before 2.3 and after 2.15 has other settings, which kb does not know")
    nccl2 = os.environ.get("TORCH_DIST_USE_NCCL2")
    if (torch == (2, 15) and nccl2 != "0") or (torch == (2, 14) and nccl2 == "1"):
        return unknown(
            "this torch uses the NCCL backend nccl2, which has no monitor and ignores its variables",
            "a stuck watchdog would end nothing; kb cannot see whether a call or the GIL will block",
            advice="set TORCH_DIST_USE_NCCL2=0 to use the old backend with its monitor",
        )
    heartbeat = number("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", 480 if torch >= (2, 5) else 600)
    dump = number("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", 15000)
    monitoring = os.environ.get("TORCH_NCCL_ENABLE_MONITORING", "1")
    if heartbeat is None or dump is None or monitoring.lower() not in ON + OFF:
        return unknown(
            "a TORCH_NCCL_ variable of the monitor has a value that torch rejects or kb does not understand",
            str({name: os.environ[name] for name in os.environ if name.startswith("TORCH_NCCL_")}),
        )
    evidence = f"heartbeat {heartbeat} s; torch {torch[0]}.{torch[1]}"
    if torch >= (2, 8):  # before 2.8, whether and how long the watchdog waits depends on the dumps
        evidence = f"the watchdog waits 4 x {dump} ms for dumps after a timeout; {evidence}"
    if monitoring.lower() in OFF:
        why = f"TORCH_NCCL_ENABLE_MONITORING={monitoring}: nothing ends a process whose watchdog is stuck"
        return exposed(
            why, evidence, advice="unset it, and raise TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC if it caused a false abort"
        )
    if torch >= (2, 8) and 4 * dump >= 1000 * heartbeat:
        why = "the monitor may report a stuck watchdog while that waits for dumps, which hides the timeout before"
        return exposed(why, evidence, advice="set TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC well above the wait for dumps")
    return unknown(evidence, "these settings are right, but kb cannot see whether a driver call or the GIL will block")


def number(name: str, default: int) -> Any:
    """Reads a variable as C++'s `stoi` does, by its leading digits; None if torch rejects the value."""
    text = os.environ.get(name)
    match = re.match(r"\s*([+-]?\d{1,9})(?!\d)", text or "", re.ASCII)
    return default if text is None else int(match.group(1)) if match else None


QUICK = {  # by default 480 s, and 60 s of sleep after a timeout; here 2 s and 20 s
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "2",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",
    "TORCH_DIST_USE_NCCL2": "0",  # nccl2, the default of 2.15, has no monitor
}
STANDS_FOR = "NCCL's watchdog and its monitor: here gloo's threads stop, and the other rank times out"

gil = Experiment(
    name="gil",
    control=Arm(
        partial(call_native_code, holds_the_gil=True),
        expect=raised(GLOO_TIMEOUT),
        because="rank 0 sleeps in C and holds the GIL, which gloo's threads need to free a tensor",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    treatment=Arm(
        partial(call_native_code, holds_the_gil=False),
        expect=completed(),
        because="the same call releases the GIL, so gloo's threads continue",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    deadline_s=30,
    expected_s=(3.5, 4.3),
)
in_a_thread = Experiment(
    name="thread",
    control=Arm(
        partial(call_native_code, holds_the_gil=True, in_a_thread=True),
        expect=raised(GLOO_TIMEOUT),
        because="a Python thread of rank 0 sleeps in C and holds the GIL, which gloo's threads need",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    treatment=Arm(
        partial(call_native_code, holds_the_gil=False, in_a_thread=True),
        expect=completed(),
        because="the same call releases the GIL, so gloo's threads continue",
        fidelity="stand-in",
        stands_for=STANDS_FOR,
    ),
    deadline_s=30,
    expected_s=(3.5, 4.3),
)

probe = Probe(
    check=check,
    experiments=(
        Experiment(
            name="nccl",
            control=Arm(
                partial(arrive_late, timeout_s=4),
                expect=raised(r"watchdog got stuck for 2 seconds without making progress"),
                because="the all-reduce times out, and handling the timeout takes longer than the heartbeat allows",
                fidelity="hardware",
                env=QUICK,
            ),
            treatment=Arm(
                partial(arrive_late, timeout_s=90),
                expect=completed(),
                because="the timeout is longer than the delay of rank 1, so the watchdog continues to poll",
                fidelity="hardware",
                env=QUICK,
            ),
            backend="nccl",
            needs=Needs(gpus=2, packages={"torch": ">=2.8"}),  # before 2.8, the watchdog waits only if dumps are on
            deadline_s=90,
            settle_s=3,
            expected_s=(20, 30),
        ),
        gil,
    ),
    variants=(in_a_thread,),
)
