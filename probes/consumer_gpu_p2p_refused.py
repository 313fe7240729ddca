"""accelerate refuses to start on multiple RTX 40 cards with a driver older than 550.40.07, before NCCL starts.

A program `nvidia-smi` on the PATH stands for the cards, because accelerate only asks nvidia-smi.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import without_launcher
from kb.packages import release
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Probe,
    Symptom,
    clear,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

BOTH = {"NCCL_P2P_DISABLE": "1", "NCCL_IB_DISABLE": "1"}
NEITHER: Mapping[str, str] = {}
OLD, NEW = "535.183.01", "550.54.15"

NVIDIA_SMI = """#!/bin/sh
case "$1" in
*driver_version*) echo %(driver)s; echo %(driver)s ;;
*) echo "2, NVIDIA GeForce RTX 4090"; echo "2, NVIDIA GeForce RTX 4090" ;;
esac
"""

SCRIPT = """
from accelerate import PartialState

print("started on", PartialState().device)
"""


def simulate_cards(ctx: Context, driver: str, variables: Mapping[str, str]) -> None:
    """Simulates two RTX 4090 with this driver, for a process that would use a GPU."""
    folder = Path(ctx.path("bin"))
    folder.mkdir()
    program = folder / "nvidia-smi"
    program.write_text(NVIDIA_SMI % {"driver": driver})
    program.chmod(0o755)
    for name in BOTH:
        os.environ.pop(name, None)
    without_launcher()
    os.environ.update({"PATH": f"{folder}:{os.environ['PATH']}", "ACCELERATE_TORCH_DEVICE": "cuda", **variables})


def start(ctx: Context, *, variables: Mapping[str, str] = NEITHER, driver: str = OLD) -> None:
    simulate_cards(ctx, driver, variables)
    from accelerate import PartialState  # type: ignore[import-not-found]

    ctx.reached()
    assert PartialState().device.type == "cuda"


def start_alone(ctx: Context, *, variables: Mapping[str, str]) -> None:
    """Runs `accelerate launch` with one process."""
    simulate_cards(ctx, OLD, variables)
    script = Path(ctx.path("train.py"))
    script.write_text(SCRIPT)
    options = ("--num_processes=1", "--num_machines=1", "--mixed_precision=no", "--dynamo_backend=no")
    ctx.reached()
    command = [sys.executable, "-m", "accelerate.commands.launch", *options, str(script)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    if "started on cuda" not in ran.stdout:
        refused = re.search(r"NotImplementedError: .*", ran.stderr)
        raise Symptom(refused.group() if refused else ran.stderr[-300:])


# --- the check: would this accelerate refuse these cards with this driver and these variables? -----------------------


def check(params: Mapping[str, Any]) -> Finding:
    """Would accelerate refuse the cards here? Asks nvidia-smi, as accelerate does."""
    installed = release("accelerate")
    if not installed:
        return unknown("accelerate is not installed in this environment, or kb cannot read its release")
    gpus = query("name,driver_version")
    if not gpus or any(len(gpu) != 2 for gpu in gpus):
        return unknown("nvidia-smi is missing, does not answer, or does not list the GPUs")
    names, drivers = zip(*gpus)
    models = ", ".join(sorted(set(names)))
    evidence = f"accelerate is {installed[0]}.{installed[1]}, nvidia-smi lists {len(names)} GPUs ({models})"
    evidence += f" with driver {drivers[0]}"
    refused = ("RTX 3090", "RTX 40") if installed < (0, 27) else ("RTX 40",)
    if installed < (0, 25) or len(names) < 2 or not any(family in name for name in names for family in refused):
        return clear(evidence)
    if not re.match(r"\d+\.\d+", drivers[0]):
        return unknown(evidence, "kb cannot read the release of the driver")
    if installed >= (0, 29) and tuple(map(int, re.findall(r"\d+", drivers[0])[:3])) >= (550, 40, 7):
        return clear(evidence)
    if installed < (0, 26) and ("CUDA_VISIBLE_DEVICES" in os.environ or len(set(names)) > 1):
        return unknown(
            evidence, "this accelerate counts the GPUs that torch sees and only looks at the name of the first"
        )
    missing = [name for name in BOTH if name not in os.environ]
    if missing:
        packages = "driver 550.40.07 or newer" + (" and accelerate 0.29 or newer" if installed < (0, 29) else "")
        advice = f"install {packages}; otherwise set {' and '.join(BOTH)}"
        return exposed(evidence, f"this environment does not set {' and '.join(missing)}", advice=advice)
    return unknown(evidence, "both variables are set here, but kb cannot tell whether the launcher passes them on")


def query(fields: str) -> List[Tuple[str, ...]]:
    program = shutil.which("nvidia-smi")
    if not program:
        return []
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False, errors="replace")
    except (OSError, subprocess.TimeoutExpired):
        return []
    if listed.returncode:
        return []
    return [tuple(field.strip() for field in line.split(",")) for line in listed.stdout.splitlines() if line.strip()]


# The message of accelerate 0.25 and newer.
REFUSED = r"Using RTX (3090 or )?4000 series doesn't support faster communication broadband via P2P or IB"
CARDS = f"nvidia-smi lists two RTX 4090 with driver {OLD}"


def pair(name: str, control: partial[None], treatment: partial[None], because: str, fix: str) -> Experiment:
    return Experiment(
        name=name,
        control=Arm(
            control,
            symptom(REFUSED) if control.func is start_alone else raised(REFUSED),
            because=because,
            fidelity="stand-in",
            stands_for=STANDS_FOR,
        ),
        treatment=Arm(treatment, completed(), because=fix, fidelity="stand-in", stands_for=STANDS_FOR),
        needs=Needs(packages={"torch": ">=2.0", "accelerate": ">=0.29"}),
        world_size=1,
        deadline_s=60,
    )


STANDS_FOR = "the cards and their driver, of which accelerate only learns from nvidia-smi; a script has that name"
NO_VARIABLES = f"{CARDS}, and neither variable is set"
BOTH_SET = "NCCL_P2P_DISABLE and NCCL_IB_DISABLE are set to 1"

probe = Probe(
    check=check,
    params={},
    experiments=(
        pair(
            "driver",
            partial(start),
            partial(start, driver=NEW),
            NO_VARIABLES,
            f"nvidia-smi reports driver {NEW} instead",
        ),
    ),
    variants=(
        pair("variables", partial(start), partial(start, variables=BOTH), NO_VARIABLES, BOTH_SET),
        pair(
            "half",
            partial(start, variables={"NCCL_P2P_DISABLE": "1"}),
            partial(start, variables=BOTH),
            f"{CARDS}, and only NCCL_P2P_DISABLE is set",
            BOTH_SET,
        ),
        pair(
            "kept",
            partial(start),
            partial(start, variables={"NCCL_P2P_DISABLE": "0", "NCCL_IB_DISABLE": "0"}),
            NO_VARIABLES,
            "both variables are set to 0, and accelerate does not look at their values",
        ),
        pair(
            "visible",
            partial(start, variables={"CUDA_VISIBLE_DEVICES": "0"}),
            partial(start, variables={"CUDA_VISIBLE_DEVICES": "0", **BOTH}),
            f"{CARDS}, although only one is visible to the job",
            BOTH_SET,
        ),
        pair(
            "launched-alone",
            partial(start_alone, variables=NEITHER),
            partial(start_alone, variables=BOTH),
            "accelerate launch sets the variables only if it starts multiple processes, and here it starts one",
            BOTH_SET,
        ),
    ),
)
