"""One of two ranks computes like a card with a lowered clock: its work takes three times as long.

Lowering a clock needs root and affects every user of the card. On a GPU, the probe pauses between equal pieces of work
instead; without a GPU, the work itself is a pause.
"""

from __future__ import annotations

import re
import subprocess
import time
from functools import partial
from typing import Any, Callable, List, Mapping, Optional, Tuple

from kb.probe import Arm, Context, Experiment, Finding, Probe, Symptom, clear, completed, exposed, symptom, unknown

NUMBER = "[0-9]+[.][0-9]"
SAYS = "rank 1 computes for %.1f ms a step and waits for %.1f, rank 0 computes for %.1f and waits for %.1f"
PIECES, PIECE_S, STEPS, THIRD, TOO_SLOW = 2, 0.015, 8, 1 / 3, 2.0


def work_of(ctx: Context) -> Callable[[], None]:
    """Returns a function that always does the same amount of work."""
    if ctx.device.type != "cuda":
        return partial(time.sleep, PIECE_S)
    import torch

    weight = torch.randn(4096, 4096, device=ctx.device, dtype=torch.float16)

    def products() -> None:
        for _ in range(16):
            torch.mm(weight, weight)
        torch.cuda.synchronize()

    products()
    return products


def compute(piece: Callable[[], None], clock: float) -> float:
    """Seconds for `PIECES` of work at this share of the full clock."""
    started = time.perf_counter()
    for _ in range(PIECES):
        begun = time.perf_counter()
        piece()
        if clock < 1:
            time.sleep((time.perf_counter() - begun) * (1 / clock - 1))
    return time.perf_counter() - started


def train(ctx: Context, *, clock: float, leave_out: bool = False) -> None:
    """Both ranks have equal work and average their gradients in every step; `clock` is that of rank 1."""
    import torch

    dist = ctx.init_process_group(timeout_s=20)
    members = [0] if leave_out else [0, 1]
    group = dist.new_group(members)
    piece = work_of(ctx)
    gradient = torch.full((1000,), float(ctx.rank + 1))
    own: List[float] = []
    wait: List[float] = []
    ctx.reached()
    for _ in range(STEPS if ctx.rank in members else 0):
        own.append(compute(piece, clock if ctx.rank == 1 else 1.0))
        started = time.perf_counter()
        total = gradient.clone()
        dist.all_reduce(total, group=group)
        wait.append(time.perf_counter() - started)
        assert total[0].item() == sum(rank + 1 for rank in members)
    mine = (1000 * min(own), 1000 * min(wait)) if own else (0.0, 0.0)  # the minimum excludes other load
    times: List[Any] = [None, None]
    dist.all_gather_object(times, mine)
    ctx.note(ms_of_compute_and_wait=[[round(value, 1) for value in pair] for pair in times])
    (fast, long_wait), (slow, short_wait) = times
    if slow > TOO_SLOW * fast and short_wait < long_wait:
        raise Symptom(SAYS % (slow, short_wait, fast, long_wait))
    assert not leave_out or long_wait < fast
    assert slow < TOO_SLOW * fast, times


def repeat(ctx: Context, *, clock: float) -> None:
    """Times the same matrix products first at full clock and later at `clock`, with the output of nvidia-smi then."""
    piece = work_of(ctx)
    ctx.reached()
    first = min(compute(piece, 1.0) for _ in range(STEPS))
    reading, end = smi(SPELLINGS[0]), time.monotonic() + 3
    later: List[float] = []
    while len(later) < STEPS or (reading and reading.poll() is None and time.monotonic() < end):
        later.append(compute(piece, clock))
    ctx.note(under_load=answer_of(reading, 0.1)[0][:500], ms=[round(1000 * value, 1) for value in (first, min(later))])
    ratio = min(later) / first
    if ratio > TOO_SLOW:
        raise Symptom("the same matrix products take %.1f times as long as at first" % ratio)


# --- the check: what lowers the clock of each GPU while it works? -----------------------------------------------------

QUERY = "index,pstate,utilization.gpu,clocks.sm,clocks.max.sm,clocks.mem,clocks.max.mem,temperature.gpu,power.draw,"
QUERY += "power.limit,power.default_limit,pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,"
QUERY += "pcie.link.width.max,"
SPELLINGS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # since driver 535, and before it
NAMES = "Idle, Applications Clocks Setting, SW Power Cap, HW Slowdown, Sync Boost, SW Thermal Slowdown, "
NAMES += "HW Thermal Slowdown, HW Power Brake Slowdown, Display Clock Setting, Board Limit, Reliability"  # bit by bit
IDLE, SW_POWER_CAP, HEAT_OR_BRAKE = 0x1, 0x4, 0x20 | 0x40 | 0x80
BUSY, LOW, USUAL, LINK = 50, 0.7, 0.85, ("current", "max")  # percent of the time; shares of the highest clock


def check(params: Mapping[str, Any]) -> Finding:
    """Reads clocks, their limits and the PCIe link of each GPU once; an idle GPU shows nothing."""
    output, error = answer_of(smi(SPELLINGS[0]), 3)
    if "not a valid field" in error:  # nvidia-smi rejects the whole query if it does not know a field
        output, error = answer_of(smi(SPELLINGS[1]), 3)
    fields = (QUERY + "reasons").split(",")
    gpus = [dict(zip(fields, (value.strip() for value in line.split(",")))) for line in output.splitlines()]
    if error or not gpus or any(len(gpu) != len(fields) for gpu in gpus):
        return unknown("nvidia-smi does not list the GPUs: %s" % (error or output.strip()[:200] or "no output"))
    states, evidence = zip(*map(judged, gpus))
    if "exposed" in states:
        return exposed(*evidence, advice="compare this card with another one under the same load")
    if set(states) == {"clear"}:
        return clear(*evidence, "nothing lowers a clock now; heat may do so later")
    advice = "run this on the node while the job trains, because an idle card lowers its clock and PCIe link"
    return unknown(*evidence, advice=advice)


def judged(gpu: Mapping[str, str]) -> Tuple[str, str]:
    """The state of one GPU, and a line about it."""
    value = {name: number(text) for name, text in gpu.items()}
    busy, clock, highest = value["utilization.gpu"], value["clocks.sm"], value["clocks.max.sm"]
    draw, limit, default = value["power.draw"], value["power.limit"], value["power.default_limit"]
    line = "GPU %(index)s: %(utilization.gpu)s %% busy, %(pstate)s, SM %(clocks.sm)s of %(clocks.max.sm)s MHz" % gpu
    line += ", %(temperature.gpu)s C, %(power.draw)s of %(power.limit)s W" % gpu
    if not re.fullmatch(r"0x[0-9a-fA-F]+", gpu["reasons"]):
        return "unknown", line + "; nvidia-smi gives no reasons for the clock"
    reasons = int(gpu["reasons"], 16)
    names = ", ".join(name for bit, name in enumerate(NAMES.split(", ")) if reasons >> bit & 1)
    line += "; active: %s" % (names or "none of the reasons")
    if busy is None or not clock or not highest:
        return "unknown", line + "; nvidia-smi does not say how busy or fast it is, perhaps because of MIG or a vGPU"
    if reasons & IDLE or busy < BUSY:
        return "unknown", line + "; it is idle, or nearly so"
    found = ["heat or power lowers the clock"] if reasons & HEAT_OR_BRAKE else []
    if reasons & SW_POWER_CAP and default and limit and limit < default - 1:
        found.append("somebody lowered the power limit from %s W" % gpu["power.default_limit"])
    at_limit = bool(reasons & SW_POWER_CAP and draw and limit and draw > 0.9 * limit)
    hidden = bool(reasons & SW_POWER_CAP and not (draw and limit))  # a laptop or GB10 does not show its power limit
    if clock < LOW * highest and not at_limit and not hidden and not found:
        found.append("the clock is low" if names else "the clock is low without a reason: somebody may have locked it")
    memory, highest_memory = value["clocks.mem"], value["clocks.max.mem"]
    if memory and highest_memory and memory < LOW * highest_memory:
        found.append("memory runs at %.0f of %.0f MHz" % (memory, highest_memory))
    links = {name: [value["pcie.link.%s.%s" % (name, which)] or 0.0 for which in LINK] for name in ("gen", "width")}
    found += [f"PCIe {name} {a:.0f} of {b:.0f} while it works" for name, (a, b) in links.items() if 0 < a < b]
    if found:
        return "exposed", "%s: %s" % (line, "; ".join(found))
    if hidden:
        return "unknown", line + "; nvidia-smi does not show its power limit"
    if reasons != (SW_POWER_CAP if at_limit else 0):
        return "unknown", line + "; its clock is not low in spite of this reason"
    if clock < (LOW if at_limit else USUAL) * highest:
        return "unknown", line + "; it is slower than most cards, so compare it with one of the same model"
    if not (memory and highest_memory and all(map(all, links.values()))):
        return "unknown", line + "; nvidia-smi does not show its memory clock or its PCIe link"
    return "clear", line + ("; it is at its own power limit, which is normal under load" if at_limit else "")


def number(text: str) -> Optional[float]:
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else None


def smi(reasons: str) -> Optional[subprocess.Popen[str]]:
    """Starts nvidia-smi with the query; `reasons` is the name of the field for the reasons."""
    command = ["nvidia-smi", "--query-gpu=" + QUERY + reasons, "--format=csv,noheader,nounits"]
    try:
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError:
        return None


def answer_of(process: Optional[subprocess.Popen[str]], seconds: float) -> Tuple[str, str]:
    """The output of nvidia-smi, and an error or an empty string."""
    if process is None:
        return "", "it is not installed"
    try:
        output, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # kb does not wait for it, because in state D it does not end
        return "", "it did not answer in %g s" % seconds
    return output, (error or output).strip()[:200] if process.returncode else ""


ON_GPU = "a GPU whose clock is lowered by heat or power; the job pauses between its pieces of work"
ON_CPU = "a GPU whose clock is lowered by heat or power; the job pauses for as long as the work would take"


def pair(name: str, job: Callable[..., None], pattern: str, stands_for: str, **fixed: Any) -> Experiment:
    fix = "the job runs without the slow rank" if "leave_out" in fixed else "the clock stays at its full speed"
    return Experiment(
        name=name,
        control=Arm(partial(job, clock=THIRD), symptom(pattern), LOWERED[job is train], "stand-in", stands_for),
        treatment=Arm(partial(job, **{"clock": THIRD, **fixed}), completed(), fix, "stand-in", stands_for),
        world_size=2 if job is train else 1,
    )


LOWERED = (
    "the clock falls to a third after the first steps",
    "rank 1 runs at a third of its clock, and rank 0 waits for it",
)
SLOW = SAYS.replace("%.1f", NUMBER)
later = pair("gpu", repeat, "the same matrix products take %s times as long as at first" % NUMBER, ON_GPU, clock=1.0)

probe = Probe(
    check=check,
    experiments=(
        later.on_gpus(gpus=1, name="gpu", control=later.control, treatment=later.treatment, expected_s=(15.0, 15.0)),
        pair("ranks", train, SLOW, ON_CPU, clock=1.0),
    ),
    variants=(pair("left-out", train, SLOW, ON_CPU, leave_out=True),),
)
