"""A library allocates memory outside torch's pool, and reports a lack of memory as a status.

Without a GPU, torch's FFT stands for cuBLAS: MKL allocates outside torch's allocator, and returns a status that torch
prints if there is no memory. A list of blocks stands for the pool. Both share one limit that the kernel enforces.
"""

from __future__ import annotations

import mmap
import os
import re
import subprocess
from functools import partial
from pathlib import Path
from typing import Any, List, Mapping, Tuple

from kb.cpu_arms import limit_address_space
from kb.packages import version
from kb.probe import (
    Arm,
    Context,
    Experiment,
    Finding,
    Needs,
    Param,
    Probe,
    Symptom,
    Unavailable,
    completed,
    exposed,
    raised,
    symptom,
    unknown,
)

MIB = 1 << 20
LENGTH = 1_000_003  # a prime number, for which MKL needs tens of MiB of its own
ROOM_MIB = 256  # the pool and the library may take this much together
SPARE_MIB = 192  # a capped pool leaves this much


def call_library(ctx: Context, *, pool: str) -> None:
    """The pool grows, and keeps what is freed as a cache. Then a library needs memory for the first time.

    `pool` is `greedy` (takes all memory), `capped` (leaves room) or `emptied` (returns its cache before the call).
    """
    import torch

    if not torch.backends.mkl.is_available():
        raise Unavailable("this torch has no MKL, whose FFT stands for cuBLAS here")
    torch.set_num_threads(1)
    signal = torch.ones(LENGTH)
    torch.fft.fft(signal[:1009])  # loads the library, so that only its memory is missing later
    spectrum = torch.empty(LENGTH, dtype=torch.complex64)
    limit_address_space(ROOM_MIB * MIB)
    blocks: List[mmap.mmap] = []
    left = ROOM_MIB - (SPARE_MIB if pool == "capped" else 24)
    while left > 0:
        blocks.append(mmap.mmap(-1, 4 * MIB))
        left -= 4
    weights, cached = blocks[:2], blocks[2:]  # `cached` is like activations that the model has freed and the pool keeps
    ctx.note(in_use_mib=4 * len(weights), cached_mib=4 * len(cached), room_mib=ROOM_MIB)
    ctx.reached()
    if pool == "emptied":
        for block in cached:
            block.close()
    torch.fft.fft(signal, out=spectrum)
    assert abs(spectrum[0].item() - LENGTH) < 1 and spectrum[1].abs().item() < 1
    assert len(weights[0]) == 4 * MIB


def create_handles(ctx: Context, *, early: bool) -> None:
    """Measures what the libraries allocate outside the pool at the first matrix product and convolution."""
    import torch

    if early:
        warm_up()
    torch.cuda.synchronize()
    ctx.reached()
    free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
    warm_up()
    torch.cuda.synchronize()
    grown = torch.cuda.memory_reserved() - reserved
    taken = (free - torch.cuda.mem_get_info()[0] - grown) // MIB
    ctx.note(taken_outside_the_pool_mib=taken, pool_grown_mib=grown // MIB)
    if taken > ctx.params["budget_mib"]:
        raise Symptom(f"cuBLAS and cuDNN took {taken} MiB beside torch's pool at their first use")


def warm_up() -> None:
    import torch

    x = torch.ones(1, 8, 16, 16, device="cuda", requires_grad=True)
    weight = torch.ones(8, 8, 3, 3, device="cuda", requires_grad=True)
    y = torch.nn.functional.conv2d(x, weight).flatten(2)
    (y @ y.transpose(1, 2)).sum().backward()


# --- the check: reads the cause in a log, the free memory of the GPUs, and LD_LIBRARY_PATH ---------------------------

STATUS = re.compile(
    r"\bCU(BLAS|DNN|SOLVER|SPARSE)_STATUS_(?!SUCCESS)[A-Z_]+"
    r"|(GET|FIND) was unable to find an engine|Unable to find a valid cuDNN"
)
ASSERTION = re.compile(r"thread: \[[\d,]+\]:? [Aa]ssertion `.{1,200}failed|device-side assert|illegal memory access")
MEMORY = re.compile(r"CUDA out of memory|CUDA_ERROR_OUT_OF_MEMORY|CUDA error: out of memory")


def check(params: Mapping[str, Any]) -> Finding:
    """Do the log, the free memory or LD_LIBRARY_PATH point to a cause? Never excludes a cause."""
    evidence: List[str] = []
    if params["log"]:
        try:
            if not params["log"].is_file():
                return unknown(f"{params['log']} is not a file")
            with params["log"].open("rb") as file:
                lines = file.read(8 * MIB).decode(errors="replace").splitlines()
        except (OSError, ValueError) as error:
            return unknown(f"{params['log']}: {error}")
        places = [number for number, line in enumerate(lines) if STATUS.search(line)]
        if not places:
            return unknown(f"the first 8 MiB of {params['log']} contain no status of cuBLAS or cuDNN")
        for pattern, advice in ((ASSERTION, "an earlier kernel failed: fix that"), (MEMORY, "the GPU is full")):
            # the stderr of the ranks may be merged in any order, so a line after the status counts too
            found = [number for number, line in enumerate(lines) if pattern.search(line)]
            if found:
                first = lines[found[0]].strip()[:160]
                return exposed(f"{params['log']}:{places[0] + 1}: status", f":{found[0] + 1}: {first}", advice=advice)
        message = "a status; the first 8 MiB contain no assertion and no out-of-memory error"
        evidence.append(f"{params['log']}:{places[0] + 1}: {message}")
    free, gpus = free_memory()
    evidence += [f"GPU {index} has {mib} MiB free now" for index, mib in free]
    shadows = shadowing_libraries()
    evidence += [f"LD_LIBRARY_PATH contains {path}" for path in shadows]
    if any(mib < params["least_mib"] for _, mib in free):
        return exposed(
            *evidence,
            advice="find the process that holds the memory: nvidia-smi, and the entry gpu-held-by-other-process",
        )
    packaged = packaged_libraries() if shadows else []
    if packaged:
        return exposed(*evidence, *packaged, advice="unless memory is the cause, unset LD_LIBRARY_PATH for the job")
    return unknown(*(evidence or [gpus]), advice="pass the log of all ranks of the failed job: --set log=FILE")


def free_memory() -> Tuple[List[Tuple[str, int]], str]:
    """Returns index and free MiB of the visible GPUs, and why the list may be empty."""
    command = ["nvidia-smi", "--query-gpu=index,memory.free,name", "--format=csv,noheader,nounits"]
    try:
        ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=0.8, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return [], "nvidia-smi is missing or does not answer"
    rows = [line.split(",") for line in ran.stdout.decode(errors="replace").splitlines() if ran.returncode == 0]
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 3]
    known = [(index, int(mib)) for index, mib, _ in rows if mib.isascii() and mib.isdecimal()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return known, "nvidia-smi does not say how much memory is free"
    indices = visible.replace(" ", "").split(",")
    if not all(index.isdigit() for index in indices):
        return [], f"CUDA_VISIBLE_DEVICES={visible} does not name GPUs by index"
    if os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({name for _, _, name in rows}) > 1:
        return [], "the GPUs differ, so CUDA may number them in another order than nvidia-smi"
    return [row for row in known if row[0] in indices], "nvidia-smi does not list the visible GPUs"


def shadowing_libraries() -> List[str]:
    paths: List[Path] = []
    for folder in [name for name in os.environ.get("LD_LIBRARY_PATH", "").split(":") if name][:20]:
        for name in ("libcublas.so*", "libcudnn.so*"):
            try:
                paths += Path(folder).glob(name)
            except (OSError, ValueError):
                continue  # kb cannot read this folder
    return [str(path) for path in paths if not re.search("(site|dist)-packages", str(path))][:4]


def packaged_libraries() -> List[str]:
    """Names the cuBLAS and cuDNN that pip installed for torch. Without them, torch was built for the system's."""
    names = ("nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cublas-cu11", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
    return [f"torch has its own {name} {found}" for name in names if (found := version(name))]


STANDS_FOR = "cuBLAS and torch's caching allocator on a GPU; MKL's FFT and a list of blocks share one memory limit"


def with_pool(name: str, pool: str, because: str) -> Experiment:
    fails = raised(r"MKL FFT error: .{0,60}\b[Mm]emory")
    greedy = "the pool holds nearly all memory, most of it as cache, and the library allocates outside the pool"
    return Experiment(
        name=name,
        control=Arm(partial(call_library, pool="greedy"), fails, greedy, "stand-in", STANDS_FOR),
        treatment=Arm(partial(call_library, pool=pool), completed(), because, "stand-in", STANDS_FOR),
        world_size=1,
        expected_s=(1.0, 1.0),
    )


handles = Experiment(
    name="handles",
    control=Arm(
        partial(create_handles, early=False),
        symptom(r"cuBLAS and cuDNN took \d+ MiB beside torch's pool"),
        "cuBLAS and cuDNN create handles and load kernels at their first use, outside the pool",
        "hardware",
    ),
    treatment=Arm(
        partial(create_handles, early=True),
        completed(),
        "a warm-up has created the handles and loaded the kernels before",
        "hardware",
    ),
    world_size=1,
    backend="nccl",
    needs=Needs(gpus=1, gpu_memory_mib=3072),
    deadline_s=60,
    expected_s=(10.0, 10.0),
)

probe = Probe(
    check=check,
    params={
        "log": Param("path", "the log of all ranks of the failed job"),
        "least_mib": Param("int", "for the check: a GPU with less free MiB than this counts as full", 600),
        "budget_mib": Param("int", "for the GPU experiment: more MiB than this outside the pool are the symptom", 4),
    },
    experiments=(handles, with_pool("capped", "capped", "the pool leaves room for the library")),
    variants=(with_pool("emptied", "emptied", "the pool returns its cache before the library is called"),),
)
